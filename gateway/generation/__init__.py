"""From a request to deltas of text, independent of API and transport."""

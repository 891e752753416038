"""From a request to deltas of text, whatever the API and the transport."""

"""What several APIs share: declared routes, answers in chunks or whole, items, kept answers."""

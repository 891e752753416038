"""What several APIs share: routes' declarations, answers in chunks or whole, items, kept answers."""

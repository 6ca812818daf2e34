"""Where samples come from: click logs in Criteo's format, or a synthetic source."""

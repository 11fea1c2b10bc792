"""The front door: settings, service, command line and engine adapters; it alone builds the whole."""

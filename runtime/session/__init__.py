"""A run as its owner sees it: settings in; text, counters and a receipt out."""

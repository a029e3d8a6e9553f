"""Asks the policies in one fixed order and keeps the books: keys, slots, pools, bytes in flight, counters."""

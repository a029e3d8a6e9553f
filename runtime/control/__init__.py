"""Asks the policies in one fixed order and holds the run's state: keys, slots, pools, bytes in
flight, counters."""

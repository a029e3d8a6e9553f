"""The user interface: parse a command, call one function, render its result."""

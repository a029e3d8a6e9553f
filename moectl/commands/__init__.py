"""The commands, by the chapters of the help: a file or a folder a command, which has its options,
its work and its output."""

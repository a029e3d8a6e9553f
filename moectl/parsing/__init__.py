"""What the command line takes: each command parses its options, calls one function of `moectl.commands` and shows the
result. Everything heavy is imported inside the commands, so that `moectl --help` stays fast."""

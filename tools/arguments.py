"""The command line of a script: its docstring, and its options with their defaults."""

import argparse


def parser_of(description: str, **options: object) -> argparse.ArgumentParser:
    """Return a parser with `--name` for each of `options`: its default, or a pair of that and the
    help.

    A default of False makes a flag, a list takes several values, and a type in its place has no
    default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        default, told = option if isinstance(option, tuple) else (option, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=told)
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=told)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=told)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=told)
    return parser

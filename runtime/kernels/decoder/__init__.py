"""Modules of a decoder beside its experts, recognised by what they compute, for compiled code of
any device."""

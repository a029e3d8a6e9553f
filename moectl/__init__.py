"""What a person sees: parse, call one function, render."""

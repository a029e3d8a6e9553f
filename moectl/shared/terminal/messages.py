"""Messages of a chat in the form of OpenAI's reference, as a server's client and a file of prompts
may give them."""

from collections.abc import Mapping

Turn = Mapping[str, str]
_ROLES = {role: role for role in ("system", "user", "assistant")} | {
    "developer": "system"
}  # as templates know them


def turn_of(message: object) -> Turn | None:
    """Return the turn of one message: its role, its text and, if given, the name of the speaker.
    Return None if it is not a message of text."""
    if not isinstance(message, Mapping):
        return None
    role = message.get("role")
    name = message.get("name")
    try:
        turn = {"role": _ROLES[role], "content": text_of(message.get("content"))}
    except (KeyError, TypeError, ValueError):
        return None
    if name is None:
        return turn
    return turn | {"name": name} if isinstance(name, str) else None


def text_of(content: object) -> str:
    """Return the text of a message, whose parts are joined. Raises ValueError for anything but
    text."""
    if isinstance(content, str):
        return content
    if not (isinstance(content, list) and content and all(_is_text(part) for part in content)):
        raise ValueError("a text, or parts of the type text")
    return "".join(part["text"] for part in content)


def _is_text(part: object) -> bool:
    is_text = (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
    return is_text and part.keys() == {"type", "text"}

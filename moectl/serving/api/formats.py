"""Options of a request by which its answer has a form, a JSON schema for one, or is biased."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.session.generation.grammar.grammars import JSON_OBJECT, Grammar


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextFormat(_Format):
    """Any text."""

    type: Literal["text"]

    @property
    def grammar(self) -> None:
        return None


class ObjectFormat(_Format):
    """Any JSON object."""

    type: Literal["json_object"]

    @property
    def grammar(self) -> Grammar:
        return JSON_OBJECT


class NamedSchema(_Format):
    """A JSON schema. It is followed whether `strict` or not."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class SchemaFormat(_Format):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def grammar(self) -> Grammar:
        schema = self.json_schema.schema_
        return JSON_OBJECT if schema is None else Grammar.of_schema(schema)


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def biases_of(given: Any) -> tuple[tuple[int, float], ...]:
    """Return the biases of a body, which have token ids for names. Raises ValueError for others."""
    found = {} if given is None else given
    if not (
        isinstance(found, dict)
        and all(name.isascii() and name.isdigit() and len(name) < 10 for name in found)
        and all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in found.values())
    ):
        raise ValueError('token ids with numbers from -100 to 100, as {"42": -100}')
    return tuple((int(name), float(bias)) for name, bias in found.items())

"""Tokens of texts, the model's properties, and the page that lists the routes."""

import re

import httpx2

from runtime.model.open import MoeModel
from tests.helpers.serving import Running


def test_tokens_there_and_back(web: httpx2.Client, opened: MoeModel) -> None:
    """llama.cpp's names and vLLM's are both understood."""
    text = "An old dog by the gate"
    ids = opened.tokenizer(text, add_special_tokens=False).input_ids
    special = opened.tokenizer(text).input_ids
    for asked, expected in (
        ({"content": text}, ids),
        ({"content": text, "add_special": True}, special),
        ({"prompt": text}, special),
        ({"prompt": text, "add_special_tokens": False}, ids),
        ({"content": ""}, []),
    ):
        told = web.post("/tokenize", json=asked).json()
        assert (told["tokens"], told["count"]) == (expected, len(expected))
    chat = web.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
    assert chat["count"] >= len(ids) and chat["max_model_len"] == 256
    back = web.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"content": opened.tokenizer.decode(ids), "prompt": back["content"]}
    for asked in ({}, {"content": text, "prompt": text}, {"content": "a" * 20_000}):
        assert web.post("/tokenize", json=asked).status_code in (400, 413)


def test_properties(server: Running, web: httpx2.Client) -> None:
    props = web.get("/props").json()
    assert (props["total_slots"], props["model_alias"]) == (3, "tiny")
    assert props["default_generation_settings"] == {"n_ctx": 256}
    assert re.fullmatch(r"\d+\.\d+.*", web.get("/version").json()["version"])
    [model] = web.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 256


def test_the_routes_on_a_page(web: httpx2.Client) -> None:
    """It asks no other host, and names each route with the fields of its body."""
    page = web.get("/docs")
    assert "<script" not in page.text and "http" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for route in web.get("/openapi.json").json()["paths"]:
        assert f" {route}</h2>" in page.text
    assert "<code>max_completion_tokens</code><td>integer" in page.text

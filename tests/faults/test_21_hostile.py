"""Files made to run code, to be read outside their folder, or to take all memory and time.

By the thousand: the torments `hostile_models`, `hostile_artefacts` and `hostile_inputs`. Nothing is
looked for on the network: tests/profilers/text/test_corpus.py, and models by name in
tests/faults/test_11_checkpoint.py.
"""

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2.exceptions import SecurityError

from artifacts.errors import BadInput, OutOfResources, Problem
from artifacts.modelshapes.known import model_shape
from artifacts.traces import parquet
from artifacts.traces.parquet import from_table, read_parquet, to_table, write_parquet
from moectl.cli import main
from profilers.compare.task_files import keep_templates_in
from profilers.compare.tasks import load_tasks
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.fingerprint import config_digest, content_digest
from runtime.model.open import open_model
from runtime.session.presets import find_presets
from runtime.session.session import Session, Settings
from tests import ROOT
from tests.faults.models import Copy, refusal, with_config
from tests.faults.stores import changed, everything
from tests.helpers import artefacts
from tests.helpers.safetensors import Tensors, joined, parsed


def test_code_that_comes_with_a_model_is_not_run(copy: Copy) -> None:
    names = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", None],
    }
    folder = with_config(copy("olmoe"), model_type="unheard-of", auto_map=names)
    (folder / "evil.py").write_text("raise SystemExit('this ran')")
    assert "cannot use the config.json" in refusal(folder)


def test_pickled_weights(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "\\ud800.safetensors"])
def test_index_that_leaves_its_folder(copy: Copy, name: str) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    assert "no file of its folder" in refusal(folder)


def test_pickle_is_read_from_nowhere_but_our_own_processes() -> None:
    """Tasks and results are pickled between the command and its workers, local or on Ray, but never
    read from files; of SGLang's recordings torch reads tensors alone."""
    loading = re.compile(r"pickle\.loads?\(|torch\.load\(|allow_pickle=True|marshal\.loads?\(")
    sources = (
        path
        for part in ("artifacts", "runtime", "profilers", "moectl")
        for path in (ROOT / part).rglob("*.py")
    )
    found = {
        path.relative_to(ROOT).as_posix() for path in sources if loading.search(path.read_text())
    }
    recorder = (ROOT / "artifacts/importers/sglang.py").read_text(encoding="utf-8")
    assert recorder.count("torch.load(") == recorder.count("weights_only=True") == 1
    assert found == {
        "artifacts/importers/sglang.py",
        "profilers/quantise/one_expert.py",
        "profilers/workers/ray.py",
        "profilers/routing/distribute.py",
    }


@pytest.mark.parametrize(
    "name", ["..", "", "a\0b", 5, None, ["model.safetensors"], "./model.safetensors"]
)
def test_index_with_names_that_no_file_in_its_folder_can_have(copy: Copy, name: object) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": name}}))
    assert str(folder) in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(BadInput, match="is missing"):
        open_checkpoint(folder)


def test_index_that_points_at_itself(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": index.name}}))
    assert f"{index} is truncated or no safetensors file" in refusal(folder)


CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": -1},
        {"num_experts": 1e308},
        {"hidden_size": 10**400},
        {"decoder_sparse_step": "often"},
        {"mlp_only_layers": 3},
        {"first_k_dense_replace": [1]},
        {"shared_expert_intermediate_size": {"a": 1}},
        {"text_config": [1]},
        {"vocab_size": None},
    ],
)
def test_shapes_of_configs_that_are_none(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"vocab_size": 16} | change))
    with pytest.raises(BadInput, match=r"config\.json"):
        model_shape(str(path))


def test_a_config_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(BadInput, match="nested too deeply"):
        model_shape(str(path))
    assert "nested too deeply" in refusal(tmp_path)


def test_a_packed_checkpoint_is_not_named_by_its_header(copy: Copy) -> None:
    """Folders are named after the fingerprint."""
    folder = copy("olmoe")
    path = folder / "model.safetensors"
    tensors = parsed(path.read_bytes())
    for origin, is_taken in (("b" * 64, True), ("../../../../etc/", False)):
        content = content_digest(open_checkpoint(folder).tensors.values())
        said = {"moectl_packed_from": origin, "moectl_packed_config": config_digest(folder)}
        said["moectl_packed_content"] = content
        path.write_bytes(joined(Tensors(tensors.header | {"__metadata__": said}, tensors.data)))
        found = open_model(str(folder)).fingerprint
        assert (found == origin) == is_taken and len(found) == 64


def test_a_chat_template_that_fails(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with (
        Session(
            open_model(str(folder)), Settings(budget="100%", link="disk", window="0B")
        ) as session,
        pytest.raises(BadInput, match="the model's chat template cannot be used"),
    ):
        session.encode([{"role": "user", "content": "hello"}])


# Stores


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artefacts.fill(tmp_path_factory.mktemp("hostile") / "moe.duckdb")


def test_a_store_as_it_was_written_is_read(whole: Path) -> None:
    everything(whole)


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return shutil.copyfile(whole, tmp_path / "moe.duckdb")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "run/../../x"])
def test_a_manifest_cannot_leave_its_folder(store: Path, name: str) -> None:
    changed(store, f"UPDATE replicas SET file = '{name}' WHERE layer = 1 AND expert = 2")
    with pytest.raises(BadInput, match="such a manifest is not followed"):
        everything(store)
    if name.startswith(".."):
        assert main(["inspect", "replicas", "--verify", "--store", str(store)]) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE buddies SET buddy = 255",
        "UPDATE buddies SET rank = 65535",
        "UPDATE buddies SET q = 'nan'",
        "UPDATE quant_loss SET bits = 0 WHERE bits = 1",
        "UPDATE quant_loss SET layer = 9",
        "UPDATE curves SET size = NULL WHERE kind = 'hit' AND layer = 0",
        "UPDATE curves SET value = 'inf'",
        "UPDATE similarity SET j = 4",
        "UPDATE entropy SET layer = 1",
        "UPDATE splits SET theta = 'nan'",
        "UPDATE expert_maps SET embedding = [NULL, 1, 2]",
        "UPDATE replicas SET bits = 7",
        (
            "UPDATE hardware SET attention_s = -1 WHERE tokens IS NOT NULL AND link IS NULL AND "
            "near_s IS NULL"
        ),
        "UPDATE traces SET layer = 65535",
        "UPDATE runs SET parameters = '[1]'",
        "UPDATE runs SET parameters = '{}'",
        "UPDATE runs SET contents = '{\"traces\": 1}'",
        "DELETE FROM schema_version",
        "UPDATE models SET num_experts = 2000000000",
    ],
)
def test_rows_that_fit_no_model(store: Path, statement: str) -> None:
    with pytest.raises(Problem) as caught:
        everything(changed(store, statement))
    assert "\n" not in str(caught.value)


def test_a_preset_of_no_scope(store: Path) -> None:
    assert find_presets(["tuned"], store)["tuned"].scope == "layer"
    with pytest.raises(BadInput, match="preset tuned of run 7 has scope 'planet'"):
        find_presets(["tuned"], changed(store, "UPDATE presets SET scope = 'planet'"))


# Traces


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("layer", 4096, "no model has more than 4,096"),
        ("layer", 2**31, "layer"),
        ("token", None, "an empty place in row"),
        ("pass", "first", "pass"),
        ("experts", [0, 65536], "experts"),
        ("experts", [0, 4], "selects expert 4"),
        ("weights", [math.nan, 1.0], "negative or not finite"),
        ("weights", [1.0], "2 experts but 1 weights"),
        ("probabilities", ["a"], "probabilities"),
        ("phase", "between", "must say"),
    ],
)
def test_traces_of_other_things(tmp_path: Path, name: str, values: object, said: str) -> None:
    table = to_table(artefacts.trace())
    at = table.column_names.index(name)
    odd = table.column(name).to_pylist()
    odd = [values, *odd[1:]] if values is None else [values] * len(odd)
    path = tmp_path / "trace.parquet"
    pq.write_table(table.set_column(at, name, pa.array(odd)), path)
    with pytest.raises(BadInput, match=said):
        read_parquet(path, num_experts=4)


def test_metadata_that_count_nothing(tmp_path: Path) -> None:
    table = to_table(artefacts.trace())
    for said in (b"nan", b"9" * 5000, b"-1", b"0"):
        with pytest.raises(BadInput, match=r"moectl\.predicted_layers"):
            from_table(table.replace_schema_metadata({b"moectl.predicted_layers": said}))


def test_a_small_file_of_many_rows_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.parquet"
    write_parquet(artefacts.trace(), path)
    read_parquet(path)
    monkeypatch.setattr(parquet, "MOST_NBYTES", 1000)
    with pytest.raises(OutOfResources, match="unpacks to more than"):
        read_parquet(path)


# Tasks


TASK = """
task: asked
dataset_path: json
dataset_kwargs: {data_files: {test: asked.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["one", "two"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"{{question}}"', "!function code.run", "names code"),
        ('"{{question}}"', "!!python/name:os.system", "names code"),
        ("metric: acc", "metric: ./code.py", "none of the harness's own"),
        ("metric: acc", "metric: [acc]", "none of the harness's own"),
        ("metric: acc", "metric: acc, hf_evaluate: true", "none of the harness's own"),
        ("task: asked", "task: asked\ninclude: beside.yaml", "names code"),
        ("task: asked", "task: asked\ninclude: task.yaml", "includes itself"),
        ("task: asked", f"task: asked\nx: &a [{', '.join('b' * 99)}]\ny: &b [{', '.join(['*a'] * 99)}]\nz: "
f"[{', '.join(['*b'] * 99)}]", "unfolds to more than"),
        ("task: asked", "task: asked\nx: &a [*a]", "unfolds to more than|cannot be loaded"),
        ("task: asked", "task: asked\nx: " + "[" * 1100, "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_task_file_runs_nothing(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('this ran')")
    (tmp_path / "beside.yaml").write_text("process_docs: !function code.run")
    (tmp_path / "asked.jsonl").write_text('{"question": "What?", "answer": 0}\n')
    path = tmp_path / "task.yaml"
    path.write_text(TASK.replace(old, new))
    with pytest.raises(BadInput, match=said):
        load_tasks([str(path)])


def test_a_template_sees_nothing_of_python() -> None:
    keep_templates_in()
    from lm_eval.utils import apply_template

    assert apply_template("{{ text | regex_replace('b', 'c') }}", {"text": "abc"}) == "acc"
    with pytest.raises(SecurityError):
        apply_template("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})

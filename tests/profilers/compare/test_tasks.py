"""Tasks of lm-evaluation-harness score alike through a session and through the harness's own model
type."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from artifacts.errors import BadInput, BadUsage
from artifacts.traces.trace import DECODE, PREFILL
from profilers.compare import continuations
from profilers.compare.tasks import Tasks, TaskScore, check_tasks, evaluate, load_tasks
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings

pytestmark = pytest.mark.slow

harness = pytest.importorskip(
    "lm_eval.evaluator", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
)

COMMON = (
    "dataset_path: json\ndataset_kwargs: {data_files: {test: documents.jsonl}}\ntest_split: test\n"
)
TASKS = {
    "choosing": "output_type: multiple_choice\ndoc_to_text: '{{a}}'\ndoc_to_choice: ['{{b}}', ' an old', "
    "' gate by']\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n",
    "reading": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{a}}{{b}}'\n"
    "metric_list: [{metric: word_perplexity}]\n",
    "writing": "output_type: generate_until\ndoc_to_text: '{{a}}'\ndoc_to_target: '{{b}}'\n"
    "generation_kwargs: {until: ['gate'], max_gen_toks: 5}\nmetric_list: [{metric: exact_match}]\n",
}
_NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"
LOSSLESS = [
    {"preset": "full"},
    {"preset": "on-demand", "budget": "25%"},
    {"preset": "near", "budget": "25%"},
]


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks over the same documents, of different lengths."""
    path = tmp_path_factory.mktemp("tasks")
    lines = [
        json.dumps({"a": f"{'seven sheep and ' * n}an old dog", "b": " by the gate"})
        for n in range(4)
    ]
    (path / "documents.jsonl").write_text("\n".join(lines))
    for name, text in TASKS.items():
        (path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{text}")
    return path


def answers(model: object, tasks: Path | Tasks) -> dict[str, object]:
    """All requests and answers of the harness, and its metrics."""
    loaded = (tasks if isinstance(tasks, Tasks) else load_tasks([str(tasks)])).loaded
    given = {"tasks": {one.task_name: one for one in loaded}, "groups": {}, "group_map": {}}
    found = harness.evaluate(model, given, bootstrap_iters=0)
    samples = {
        task: sorted(
            (json.dumps(one["arguments"], default=str), str(one["resps"])) for one in of_task
        )
        for task, of_task in found["samples"].items()
    }
    return {"samples": samples, "results": found["results"]}


@pytest.fixture(scope="module")
def expected(plain: PreTrainedModel, opened: MoeModel, tasks: Path) -> dict[str, object]:
    from lm_eval.models.huggingface import HFLM

    return answers(HFLM(plain, tokenizer=opened.tokenizer, batch_size=1), tasks)


@pytest.mark.parametrize("settings", LOSSLESS, ids=lambda settings: settings["preset"])
def test_every_answer_is_the_plain_models(
    settings: dict[str, str], opened: MoeModel, tasks: Path, expected: dict[str, object]
) -> None:
    from profilers.compare.lm_eval_model import SessionLM

    with Session(opened, Settings(**settings)) as session:
        assert answers(SessionLM(session), tasks) == expected
        found = evaluate(session, load_tasks([str(tasks)]))
        assert session.controller.counters.totals()["requests"] > 0
    values = {(score.task, score.metric): score.value for score in found}
    results = expected["results"]
    assert values["choosing", "acc"] == results["choosing"]["acc,none"]
    perplexity = results["reading"][
        "word_perplexity,none"
    ]  # of the whole text: sums round by the processor
    assert values["reading", "word_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert all(isinstance(score, TaskScore) and score.count == 4 for score in found)


@pytest.mark.parametrize("settings", LOSSLESS, ids=lambda settings: settings["preset"])
def test_a_batch_answers_within_rounding_of_the_plain_model(
    settings: dict[str, str], opened: MoeModel, tasks: Path, expected: dict[str, object]
) -> None:
    """Likelihoods within 1e-5 for each token in float32, and the same texts, in the order of the
    items."""
    from profilers.compare.lm_eval_model import SessionLM

    with Session(opened, Settings(**settings)) as session:
        found = answers(SessionLM(session, batch_size=3), tasks)
        passes = len(session.controller.counters.passes)
    assert passes <= (12 + 4 + 4 * 5) / 2, "choices, texts and tokens share passes"
    assert found["samples"]["writing"] == expected["samples"]["writing"]
    for task in ("choosing", "reading"):
        for (asked, ours), (same, theirs) in zip(
            found["samples"][task], expected["samples"][task], strict=True
        ):
            assert asked == same and re.sub(_NUMBER, "", ours) == re.sub(_NUMBER, "", theirs)
            given, wanted = (
                [float(number) for number in re.findall(_NUMBER, text)] for text in (ours, theirs)
            )
            assert given == pytest.approx(wanted, abs=1e-5 * len(asked))


@pytest.mark.parametrize(("batch", "names"), [(1, [*TASKS]), (3, ["choosing", "reading"])])
def test_routers_see_the_tokens_that_are_asked_for_and_no_padding(
    plain: PreTrainedModel, opened: MoeModel, tasks: Path, batch: int, names: list[str]
) -> None:
    from lm_eval.models.huggingface import HFLM

    given = []
    hook = plain.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(
            kwargs.get("input_ids", args[0] if args else None).numel()
        ),
        with_kwargs=True,
    )
    loaded = load_tasks([str(tasks / f"{name}.yaml") for name in names])
    answers(HFLM(plain, tokenizer=opened.tokenizer, batch_size=1), loaded)
    hook.remove()
    with Session(opened, Settings(budget="50%")) as session:
        recorder = session.record()
        evaluate(session, loaded, batch=batch)
        trace = recorder.trace()
    assert len(trace) == sum(given) * opened.shape.num_layers


def test_the_harness_knows_moectl_by_name(
    folder: Path, tasks: Path, expected: dict[str, object]
) -> None:
    from lm_eval.api.registry import get_model

    import profilers.compare.lm_eval_model  # noqa: F401  registers the type

    named = get_model("moectl")
    given = {"pretrained": str(folder), "preset": "near", "budget": "25%"}
    model = named.create_from_arg_obj(given, {"batch_size": 1, "device": "cpu"})
    with model.session:
        assert answers(model, tasks) == expected
    with pytest.raises(BadUsage, match="give 1, 64 or auto"):
        named.create_from_arg_obj(given, {"batch_size": "many"})


def test_a_digest_is_of_what_is_asked_and_of_how(tasks: Path, tmp_path: Path) -> None:
    of_all, again = (load_tasks([str(tasks)]).digest for _ in range(2))
    assert of_all == again
    (tmp_path / "documents.jsonl").write_text(
        (tasks / "documents.jsonl").read_text().replace("old", "odd")
    )
    (tmp_path / "reading.yaml").write_text((tasks / "reading.yaml").read_text())
    digests = {load_tasks([str(folder / "reading.yaml")]).digest for folder in (tasks, tmp_path)}
    assert len(digests | {of_all}) == 3


def test_the_built_in_task_is_scored(opened: MoeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "COUNT", 5)
    check_tasks(["continuations"])
    tasks = load_tasks(["continuations"])
    assert tasks.digest == load_tasks(["continuations"]).digest
    with Session(opened, Settings("full")) as session:
        (score,) = evaluate(session, tasks)
    assert (score.task, score.metric, score.count) == ("continuations", "acc", 5)
    assert 0 <= score.value <= 1 and score.stderr is not None


def test_a_prompt_that_places_experts_is_read_twice(
    opened: MoeModel, tasks: Path, expected: dict[str, object]
) -> None:
    """With every expert at full precision the second reading gives what the first does, but for the
    rounding of what is computed near."""
    from profilers.compare.lm_eval_model import SessionLM

    with Session(opened, Settings("monde-static", budget="25%")) as session:
        phases = []
        session.watcher.on_step = lambda step: (
            phases.append(step.phase) if step.layer == 0 else None
        )
        results = answers(SessionLM(session), tasks)["results"]
    assert results["choosing"] == expected["results"]["choosing"]
    assert phases[:4] == [PREFILL, DECODE, PREFILL, DECODE]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("continuation", "did you mean continuations?"),
        ("hellaswag", "Known: continuations"),
        ("no/such.yaml", "Known: continuations"),
    ],
)
def test_an_unknown_task_is_answered_with_what_there_is(name: str, told: str) -> None:
    with pytest.raises(
        BadUsage, match=rf"unknown task .* {re.escape(told)} \(or give a YAML file .* lm-eval:NAME"
    ):
        check_tasks([name])


def test_two_tasks_of_one_name_are_refused(tasks: Path) -> None:
    with pytest.raises(BadUsage, match="names writing twice"):
        load_tasks([str(tasks / "writing.yaml"), str(tasks / "writing.yaml")])


def test_without_the_harness_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BadUsage, match=r"pip install 'moectl\[eval\]'"):
        check_tasks(["continuations"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "cannot be loaded"),
        (
            "task: one\noutput_type: multiple_choice\ndataset_path: json\ntest_split: test\n",
            "cannot be loaded",
        ),
        (f"task: one\noutput_type: loglikelihood_rolling\n{COMMON}", "documents.jsonl"),
    ],
)
def test_a_task_that_makes_no_sense_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        load_tasks([str(tmp_path / "one.yaml")])
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer_is_refused(opened: MoeModel) -> None:
    from profilers.compare.lm_eval_model import SessionLM

    bare = replace(opened, tokenizer=None)
    with Session(bare, Settings("full")) as session, pytest.raises(BadInput, match="no tokenizer"):
        SessionLM(session)

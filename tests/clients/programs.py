"""What programs (of evaluation, of load, an agent) do against a server of the bundled model, in an environment each.

A program gets files, runs in an empty folder that is its home, and leaves what came of it in files or in its output. A
case that returns has passed. The bundled model has learned to write a person's JSON. run.py calls this.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.environments import HERE, ROOT, node_programs, python_programs, surroundings

TOKENIZER = str(ROOT / "jaxsgl" / "bundled_model")
LIMIT_S = 300.0
PEOPLE = (("Anna", 31, "Paris"), ("Bob", 42, "Rome"), ("Mia", 25, "Oslo"), ("Tom", 52, "London"))
QUESTIONS = tuple(f"Give me JSON for {name}, {age}, {city}" for name, age, city in PEOPLE)
ANSWERS = tuple(json.dumps({"name": name, "age": age, "city": city}) for name, age, city in PEOPLE)
AGE = '"age":'
PROMPTS = tuple(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n" for asked in QUESTIONS)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program runs: the server's URL without a path, the programs' folder, and a folder of its own."""

    url: str
    programs: Path
    folder: Path

    def call(self, program: str, *arguments: str | Path) -> str:
        """Returns what the program printed. Raises `AssertionError` with its last lines if it fails."""
        ended = subprocess.run(
            [str(self.programs / program), *map(str, arguments)],
            cwd=self.folder, env=surroundings(self.folder), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
        assert ended.returncode == 0, (
            f"{program} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}"
        )
        return ended.stdout

    def write(self, name: str, text: str) -> Path:
        """Writes a file of the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def found(self, pattern: str) -> str:
        """The text of the only file of the folder that is so called."""
        (path,) = self.folder.rglob(pattern)
        return path.read_text()


Case = Callable[[Place], None]


def lines(values: Sequence[Any]) -> str:
    """JSON, a line each."""
    return "".join(json.dumps(value) + "\n" for value in values)


# lm-eval: the right answer is the likelier one, and every token of it the likeliest; and what is generated is it.


def _lm_eval(at: Place, model: str, path: str, **tasks: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the samples of each task, in the order of `PEOPLE`."""
    docs = [
        # What is scored begins after a word: spaces at a prompt's end would be scored too, which no one has learned.
        {
            "prompt": prompt, "question": asked, "answer": answer, "begun": prompt + answer.partition(AGE)[0] + AGE,
            "choices": [ANSWERS[number - 1].partition(AGE)[2], answer.partition(AGE)[2]],
        }
        for number, (prompt, asked, answer) in enumerate(zip(PROMPTS, QUESTIONS, ANSWERS, strict=True))
    ]  # fmt: skip
    data = at.write("docs.jsonl", lines(docs))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in tasks.items():
        at.write(f"tasks/{name}.yaml", json.dumps({"task": name, **common, "target_delimiter": "", **task}))
    of_model = f"model=default,base_url={at.url}{path},tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    at.call(
        "lm_eval", "run", "--model", model, "--model_args", of_model, "--include_path", at.folder / "tasks",
        "--tasks", ",".join(tasks), "--output_path", at.folder / "out", "--log_samples",
        *(["--apply_chat_template"] if "chat" in model else []),
    )  # fmt: skip
    samples = {name: at.found(f"samples_{name}_*.jsonl").splitlines() for name in tasks}
    return {name: sorted(map(json.loads, of), key=lambda sample: sample["doc_id"]) for name, of in samples.items()}


GENERATED = {
    "output_type": "generate_until", "doc_to_target": "answer", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 60, "temperature": 0},
}  # fmt: skip


def lm_eval_completions(at: Place) -> None:
    scored = {
        "output_type": "multiple_choice", "doc_to_text": "begun", "doc_to_choice": "choices", "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    generated = GENERATED | {"doc_to_text": "prompt"}
    samples = _lm_eval(at, "local-completions", "/v1/completions", scored=scored, generated=generated)
    for sample in samples["scored"]:
        (wrong, wrong_is_likeliest), (right, right_is_likeliest) = sample["filtered_resps"]
        assert float(wrong) < float(right) < 0.0 and sample["acc"] == 1.0, sample
        assert (wrong_is_likeliest, right_is_likeliest) == ("False", "True"), sample
    assert [sample["filtered_resps"] for sample in samples["generated"]] == [[answer] for answer in ANSWERS]


def lm_eval_chat(at: Place) -> None:
    generated = GENERATED | {"doc_to_text": "question"}
    samples = _lm_eval(at, "local-chat-completions", "/v1/chat/completions", generated=generated)
    assert [sample["filtered_resps"] for sample in samples["generated"]] == [[answer] for answer in ANSWERS]


# Programs that measure: they see every request succeed, and count the tokens that there were.


def guidellm_completions(at: Place) -> None:
    data = at.write("prompts.jsonl", lines([{"prompt": prompt} for prompt in PROMPTS]))
    out = at.folder / "out.json"
    at.call(
        "guidellm", "benchmark", "run", "--target", at.url, "--rate-type", "concurrent", "--rate", "2",
        "--max-requests", "4", "--data", data, "--processor", TOKENIZER, "--output-path", out,
        "--disable-progress", "--disable-console-outputs",
    )  # fmt: skip
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    assert sorted(request["output"].strip() for request in requests["successful"]) == sorted(ANSWERS)
    for request in requests["successful"]:
        assert request["prompt_tokens"] > 20 and request["output_tokens"] > 20, request
        assert request["start_time"] < request["first_token_time"] <= request["last_token_time"], request


def evalscope_perf(at: Place) -> None:
    data = at.write("lines.txt", "".join(f"{question}\n" for question in QUESTIONS))
    at.call(
        "evalscope", "perf", "--url", f"{at.url}/v1/chat/completions", "--model", "default", "--api", "openai",
        "--parallel", "2", "--number", "4", "--dataset", "line_by_line", "--dataset-path", data,
        "--tokenizer-path", TOKENIZER, "--min-prompt-length", "0", "--max-tokens", "100", "--temperature", "0",
        "--stream", "--outputs-dir", at.folder / "out", "--no-timestamp",
    )  # fmt: skip
    found = json.loads(at.found("benchmark_summary.json"))
    assert (found["Success Requests"], found["Failed Requests"], found["Stream Requests"]) == (4, 0, 4), found
    assert 20 < found["Avg Input Tokens"] < 30 and 20 < found["Avg Output Tokens"] < 30, found
    assert 0 < found["Avg TTFT (ms)"] < 1000 * found["Avg Latency (s)"], found


# promptfoo: its checks of the answers pass, and what was answered is what they saw.


def promptfoo(provider: str, **options: Any) -> Case:
    def case(at: Place) -> None:
        of_provider = {"apiBaseUrl": f"{at.url}/v1", "apiKey": "none", "temperature": 0, **options}
        config = {
            "providers": [{"id": provider, "config": of_provider}],
            "prompts": ["Give me JSON for {{name}}, {{age}}, {{city}}"],
            "tests": [
                {
                    "vars": {"name": name, "age": age, "city": city},
                    "assert": [
                        {"type": "is-json", "value": SCHEMA},
                        {"type": "javascript", "value": f"(o => (o.city ?? JSON.parse(o).city) === '{city}')(output)"},
                    ],
                }
                for name, age, city in PEOPLE
            ],
        }
        out = at.folder / "out.json"
        at.call(
            "promptfoo", "eval", "-c", at.write("c.json", json.dumps(config)), "-o", out, "--no-cache", "--no-table"
        )
        results = json.loads(out.read_text())["results"]
        assert results["stats"]["successes"] == len(PEOPLE), results["stats"]
        outputs = [result["response"]["output"] for result in results["results"]]
        found = [json.loads(output) if isinstance(output, str) else output for output in outputs]
        assert sorted(map(json.dumps, found)) == sorted(ANSWERS)

    return case


RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


# Codex: its tools are of kinds that no one can call here, too, and a conversation goes on.

CODEX = """
model = "default"
model_provider = "jaxsgl"
model_instructions_file = "{instructions}"
web_search = "live"
include_permissions_instructions = false
include_environment_context = false
[skills]
include_instructions = false
[model_providers.jaxsgl]
name = "jaxsgl"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def _codex(at: Place, *arguments: str | Path) -> tuple[list[str], dict[str, int]]:
    """Returns what Codex's agent said, and the turn's usage."""
    instructions = at.write(".codex/instructions.md", "Answer.")  # its own would fill the bundled model's context
    at.write(".codex/config.toml", CODEX.format(instructions=instructions, url=at.url))
    events = [json.loads(line) for line in at.call("codex", "exec", *arguments).splitlines() if line.startswith("{")]
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    (usage,) = (event["usage"] for event in events if event["type"] == "turn.completed")
    return said, usage


def codex_chat(at: Place) -> None:
    flags = ("--json", "--skip-git-repo-check")
    said, usage = _codex(at, *flags, QUESTIONS[0])
    assert said == [ANSWERS[0]] and usage["output_tokens"] > 0, (said, usage)
    said, more = _codex(at, "resume", "--last", *flags, QUESTIONS[1])
    assert said == [ANSWERS[1]] and more["input_tokens"] > usage["input_tokens"] + usage["output_tokens"], (said, more)


def codex_structured(at: Place) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Lima", "Cairo"]}}, "required": ["city"]}
    schema = at.write("schema.json", json.dumps(city | {"additionalProperties": False}))
    (said,), _ = _codex(at, "--json", "--skip-git-repo-check", "--output-schema", schema, QUESTIONS[0])
    assert json.loads(said)["city"] in ("Lima", "Cairo"), said


_evaluators = functools.partial(python_programs, HERE / "evaluators.lock")
_promptfoo = functools.partial(node_programs, HERE / "npm" / "promptfoo")
_codex_programs = functools.partial(node_programs, HERE / "npm" / "codex")
# What makes the environment and gives its programs' folder, and the cases.
PROGRAMS: Mapping[str, tuple[Callable[[], Path], Mapping[str, Case]]] = {
    "lm-eval": (_evaluators, {"completions": lm_eval_completions, "chat": lm_eval_chat}),
    "guidellm": (_evaluators, {"completions": guidellm_completions}),
    "evalscope": (_evaluators, {"perf": evalscope_perf}),
    "promptfoo": (
        _promptfoo,
        {
            "chat": promptfoo("openai:chat:default", max_tokens=100),
            "structured": promptfoo("openai:chat:default", max_tokens=100, response_format=RESPONSE_FORMAT),
            "responses": promptfoo("openai:responses:default", max_output_tokens=100),
        },
    ),
    "codex": (_codex_programs, {"chat": codex_chat, "structured": codex_structured}),
}
OF_NODE = ("promptfoo", "codex")


def outcomes(name: str, url: str) -> dict[str, str | None]:
    """What came of each case of a program: an error, or None."""
    make, cases = PROGRAMS[name]
    programs = make()
    found: dict[str, str | None] = {}
    for case, run in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(Place(url, programs, Path(folder)))
                found[case] = None
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found

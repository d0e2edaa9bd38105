"""An engine process without a model, for tests of the front end: speaks the same messages, answers from a script.

A prompt's first ids choose what happens, see `Script`; any other prompt is echoed id by id. One new token per sample
and step, as from the real engine; sample i starts i ids later. Log-probabilities follow from the ids: -id / 8. Its
config's `random_seed` chooses how it starts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxsgl import logs
from jaxsgl.config.engine import Limits
from jaxsgl.engine_process import read_launch, set_signals
from jaxsgl.ipc import EngineLaunch, EngineMailbox, open_mailbox
from jaxsgl.mask_mark import MaskMark, NoMark
from jaxsgl.messages.orders import (
    Abort,
    Answer,
    ContinueGeneration,
    DumpState,
    FlushCache,
    ListAdapters,
    LoadAdapter,
    LoadedAdapter,
    PauseGeneration,
    PauseMode,
    Ping,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    Shutdown,
    StartProfile,
    StopProfile,
    ToEngine,
    UnloadAdapter,
    UpdateMode,
    UpdateReport,
    UpdateWeights,
    WatchCache,
    WatchEngine,
    Withdraw,
)
from jaxsgl.messages.replies import (
    CacheCleared,
    CacheEvents,
    EngineInfo,
    Load,
    PagesStored,
    Refusal,
    RefusalKind,
    Replies,
    Reply,
    Run,
    SpeculationTotals,
    StageTimes,
    TokenLogprob,
    Totals,
)
from jaxsgl.parent import be_killed_with_parent, follow_parent
from jaxsgl.requests.outputs import Pooled, PoolingSpec, StatesSpec, TokenStates
from jaxsgl.requests.request import FinishReason, Request, max_new_tokens
from jaxsgl.shared_mailbox import SharedMailbox

VOCAB_SIZE = 1000
STATES = StatesSpec(hidden=True, experts=True, hidden_size=2, num_layers=1, top_k=1)
POOLING = PoolingSpec(dimension=4, matryoshka=True, made_for_it=True)
CLASSES = ("good",)
LIMITS = Limits(vocab_size=VOCAB_SIZE, context_length=200, pool_tokens=160, pooling=POOLING)
EOS_ID = 1  # <|end|> of small_tokenizers


class Script:
    """First ids of prompts, and seeds of the configuration, with a meaning."""

    HANG = 901  # never yields a token
    DIE = 902  # SIGKILL after the third token
    FAIL = 903  # EngineFailed after the first token
    FOREVER = 904  # the same token again and again, a step every 5 ms
    REFUSE = 905  # the scheduler refuses it; the id that follows, if any, says which `RefusalKind`
    REPORT = 906  # echoes [running requests, requests ever seen, aborts ever seen]
    STICK = 907  # the loop stands still forever: no token, no answer
    PAUSE = 908  # three tokens, then none any more
    DIE_IN_MASK = 909  # SIGKILL while it makes a mask for the request
    STICK_IN_MASK = 910  # the loop stands still there

    START_FAILS = 11  # EngineFailed at start
    START_DIES = 12  # exits with status 7 at start
    START_HANGS = 13  # never ready
    START_SLOW_WORDS = 14  # SIGKILL at start; its EngineFailed arrives a little later
    CLASSIFIES = 15  # the model has a classification head, whose logit is a prompt's last id


@dataclass
class Running:
    request: Request
    index: int
    script: list[int]
    sent: list[int] = field(default_factory=list)

    @property
    def hangs(self) -> bool:
        return self.script[0] == Script.HANG or (self.script[0] == Script.PAUSE and len(self.sent) == 3)


class FakeEngine:
    def __init__(
        self,
        mailbox: EngineMailbox | SharedMailbox,
        max_requests: int,
        mark: MaskMark | NoMark,
        speculates: bool = False,
        classes: Sequence[str] = (),
    ) -> None:
        """Requests beyond `max_requests` at once are refused; `speculates`: tokens come of runs of drafts.

        `classes` are those of a classification head.
        """
        self.mailbox = mailbox
        self.mark = mark
        self.max_requests = max_requests
        self.speculates = speculates
        self.classes = classes
        self.running: dict[tuple[str, int], Running] = {}
        self.num_seen = 0
        self.num_aborts = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_steps = 0
        self.drafts = SpeculationTotals()
        self.paused = self.retracted = False
        self.drains: list[int] = []
        self.num_looks = 0
        self.version = "default"
        self.adapters: dict[str, LoadedAdapter] = {}

    def run(self) -> None:
        while True:
            idle = self.paused or all(run.hangs for run in self.running.values())
            for message in self.mailbox.receive(math.inf if idle else 0.0):
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
            stepping = [] if self.paused else list(self.running.values())
            replies = [reply for run in stepping if (reply := self.step(run)) is not None]
            if replies:
                self.send(replies)
            if not self.running:
                for number in self.drains:
                    self.obey(FlushCache(number))
                self.drains.clear()

    def send(self, replies: list[Reply]) -> None:
        self.num_tokens += sum(len(reply.token_ids) for reply in replies)
        self.num_steps += 1
        used = sum(len(run.request.prompt_ids) for run in self.running.values())
        load = Load(
            len(self.running),
            used_tokens=used,
            paused=self.paused,
            num_retracted=len(self.running) if self.retracted else 0,
            weight_version=self.version,
            adapters=tuple(self.adapters),
            totals=Totals(
                prompt_tokens=self.num_prompt_tokens,
                cached_prompt_tokens=self.num_cached_tokens,
                output_tokens=self.num_tokens,
                steps=self.num_steps,
            ),
            speculation=self.drafts,
        )
        self.mailbox.send(Replies(replies, load))

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Abort):
            for request_id, index in list(self.running):
                if request_id == message.request_id and message.index in (None, index):
                    self.abort(request_id, index)
        elif isinstance(message, Request):
            self.num_seen += 1
            script = list(message.prompt_ids)
            if script[0] == Script.REPORT:
                script = [len(self.running), self.num_seen, self.num_aborts]
            if message.adapter and message.adapter not in self.names():
                refusal = Refusal(RefusalKind.INVALID, f"no adapter named {message.adapter} is loaded")
                self.send([Reply(message.request_id, refusal=refusal)])
            elif script[0] == Script.REFUSE or len(self.running) >= self.max_requests:
                told = list(RefusalKind)[(script[1:] or [0])[0]]
                kind = told if script[0] == Script.REFUSE else RefusalKind.OVERLOADED
                self.send(
                    [Reply(message.request_id, refusal=Refusal(kind, f"the scheduler refuses this: {kind.value}"))]
                )
            elif script[0] in (Script.STICK, Script.STICK_IN_MASK, Script.DIE_IN_MASK):
                if script[0] != Script.STICK:
                    self.mark.begin(message.request_id)
                if script[0] == Script.DIE_IN_MASK:
                    os.kill(os.getpid(), signal.SIGKILL)
                while True:
                    time.sleep(1)
            else:
                for index in range(message.sampling.n):
                    self.num_prompt_tokens += len(message.prompt_ids)
                    self.num_cached_tokens += len(message.prompt_ids) // 2
                    self.running[message.request_id, index] = Running(message, index, script)

        else:
            self.obey(message)

    def priorities(self) -> list[int]:
        return [run.request.priority for run in self.running.values()]

    def cache_salts(self) -> list[str]:
        return [run.request.cache_salt for run in self.running.values()]

    def names(self) -> set[str]:
        return {name for each in self.adapters.values() for name in (each.name, each.alias)}

    def abort(self, request_id: str, index: int) -> None:
        del self.running[request_id, index]
        self.num_aborts += 1
        self.send([Reply(request_id, finish_reason=FinishReason.ABORT, index=index)])

    def obey(self, command: ToEngine) -> None:
        """The prefix cache of the fake holds one page, with one token."""
        match command:
            case Ping(number):
                self.mailbox.send(Answer(number, True))
            case PauseGeneration(number, mode):
                if mode is PauseMode.ABORT:
                    for key in list(self.running):
                        self.abort(*key)
                self.paused, self.retracted = True, mode is PauseMode.RETRACT
                self.send([])
                self.mailbox.send(Answer(number, True))
            case ContinueGeneration(number):
                self.paused = self.retracted = False
                self.send([])
                self.mailbox.send(Answer(number, True))
            case DumpState(number, check):
                state = {
                    "num_running": len(self.running),
                    "priorities": self.priorities(),
                    "cache_salts": self.cache_salts(),
                    "flushes": len(self.drains),
                    "looks": self.num_looks,
                }
                self.mailbox.send(Answer(number, True, json.dumps(state | ({"leaks": []} if check else {}))))
            case WatchEngine(number, since):
                self.num_looks += 1
                self.mailbox.send(Answer(number, True, json.dumps({"last_step": self.num_looks, "since": since})))
            case FlushCache(number, timeout_s) if self.running and timeout_s:
                self.drains.append(number)
            case FlushCache(number) if self.running:
                self.mailbox.send(Answer(number, False, f"{len(self.running)} requests wait or run"))
            case FlushCache(number):
                self.mailbox.send(CacheEvents([CacheCleared()]))
                self.mailbox.send(Answer(number, True))
            case Withdraw(number) if number in self.drains:
                self.drains.remove(number)
            case StartProfile(number, folder):
                self.mailbox.send(Answer(number, True, folder))
            case UpdateWeights(number, folder) if not folder.startswith("/weights"):
                self.mailbox.send(Answer(number, False, f"no weights in {folder}"))
            case UpdateWeights(number, _, mode, version):
                if mode is UpdateMode.ABORT:
                    for key in list(self.running):
                        self.abort(*key)
                self.version = version or "1"
                self.send([])
                text = msgspec.json.encode(UpdateReport(self.version, len(self.running))).decode()
                self.mailbox.send(Answer(number, True, text))
            case SetWeightVersion(number, version):
                self.version = version
                self.send([])
                self.mailbox.send(Answer(number, True))
            case ReleaseMemory(number) | ResumeMemory(number):
                self.paused = isinstance(command, ReleaseMemory)
                self.send([])
                self.mailbox.send(Answer(number, True))
            case LoadAdapter(number, name, folder):
                text = f"no adapter in {folder}" if folder == "/nothing" else ""
                if not text:
                    rank, pinned, alias = 8, command.pinned, command.alias
                    self.adapters[name] = LoadedAdapter(name, folder, rank, pinned, False, 0, alias)
                self.send([])
                self.mailbox.send(Answer(number, not text, text))
            case UnloadAdapter(number, name):
                found = self.adapters.pop(name, None)
                self.send([])
                self.mailbox.send(Answer(number, found is not None, "" if found else f"no adapter named {name}"))
            case ListAdapters(number):
                text = msgspec.json.encode(list(self.adapters.values())).decode()
                self.mailbox.send(Answer(number, True, text))
            case StopProfile(number):
                self.mailbox.send(Answer(number, False, "no profile is being recorded"))
            case WatchCache(number):
                self.mailbox.send(CacheEvents([PagesStored([-5], [7], None)], number))

    def pool(self, run: Running) -> Reply:
        """The hidden state says which ids came, negative with an adapter; the logit of a label token is id / 8."""
        request, ids = run.request, run.request.prompt_ids
        del self.running[request.request_id, run.index]
        sign = -1 if request.adapter else 1
        hidden = array("f", [sign * part for part in (sum(ids), len(ids), ids[0], ids[-1])]).tobytes()
        labels = request.pooling.label_ids if request.pooling else ()
        classes = (float(ids[-1]),) if self.classes else ()
        pooled = Pooled(b"", tuple(sign * label / 8 for label in labels), 8.0) if labels else Pooled(hidden, classes)
        return Reply(request.request_id, (), FinishReason.LENGTH, len(ids) // 2, pooled=pooled)

    def step(self, run: Running) -> Reply | None:
        if run.hangs:
            return None
        if run.request.pooling is not None:
            return self.pool(run)
        match run.script[0]:
            case Script.DIE if len(run.sent) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            case Script.FAIL if len(run.sent) == 1:
                self.mailbox.fail("the fake engine failed as told")
                sys.exit(1)
            case Script.FOREVER:
                time.sleep(0.005)
        token = run.script[(run.index + len(run.sent)) % len(run.script)]
        run.sent.append(token)
        sampling = run.request.sampling
        reason = None
        if token in sampling.stop_token_ids or (token == EOS_ID and not sampling.ignore_eos):
            reason = FinishReason.STOP
        elif len(run.sent) >= max_new_tokens(run.request, LIMITS):
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[run.request.request_id, run.index]
        guess = self.guess(run.request) if self.speculates and len(run.sent) > 1 else None
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and run.index == 0 and len(run.sent) == 1:
            prompt_logprobs = tuple(logprob(id, sampling.prompt_logprobs) for id in run.request.prompt_ids[1:])
        return Reply(
            run.request.request_id,
            (token,),
            reason,
            cached_tokens=len(run.request.prompt_ids) // 2,
            index=run.index,
            logprob=None
            if sampling.logprobs is None
            else logprob(token, sampling.logprobs, sampling.logprob_token_ids),
            prompt_logprobs=prompt_logprobs,
            times=StageTimes(0.001, 0.002) if len(run.sent) == 1 else None,
            states=states_of(run) if sampling.wants_states else None,
            run=guess,
        )

    def guess(self, request: Request) -> Run | None:
        """Each token but the first comes of a run: of 2 drafts, or of all that the client expects; one is kept."""
        if not request.speculative:
            return None
        told, expected = self.drafts, request.prediction_ids
        guess = Run(len(expected) or 2, 1, bool(expected))
        told.runs, told.draft_tokens = told.runs + 1, told.draft_tokens + guess.drafted
        told.accepted_tokens, told.accepted_at = told.accepted_tokens + 1, (told.accepted_tokens + 1, 0)
        return guess


def states_of(run: Running) -> TokenStates:
    """The hidden state of a token is (id, position), its expert is id % 4."""
    ids = [*run.request.prompt_ids, *run.sent[:-1]]
    new = range(len(ids)) if len(run.sent) == 1 else range(len(ids) - 1, len(ids))
    hidden = array("f", [value for position in new for value in (ids[position], position)])
    return TokenStates(hidden.tobytes(), array("i", [ids[position] % 4 for position in new]).tobytes())


def logprob(token: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprob:
    top = tuple((token + i, -token / 8 - i) for i in range(num_top))
    return TokenLogprob(-token / 8, top, tuple(-token / 8 - id for id in named))


def main() -> int:
    set_signals()
    be_killed_with_parent()
    launch = read_launch(sys.stdin.buffer)
    if launch.config.random_seed == Script.START_SLOW_WORDS:
        if os.fork():  # while there is one thread: Python 3.12 warns of forking later
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.03)
    else:
        follow_parent(sys.stdin.fileno(), launch.endpoints.remove)
    logs.configure(launch.log_style, launch.name)
    logging.getLogger(__name__).debug("the fake engine starts")
    with open_mailbox(launch.endpoints) as mailbox:
        return serve(launch, mailbox)


def serve(launch: EngineLaunch, mailbox: EngineMailbox | SharedMailbox) -> int:
    match launch.config.random_seed:
        case Script.START_FAILS | Script.START_SLOW_WORDS:
            mailbox.fail("--dtype is odd, but must be even")
            return 1
        case Script.START_DIES:
            return 7
        case Script.START_HANGS:
            mailbox.receive(math.inf)
    classes = CLASSES if launch.config.random_seed == Script.CLASSIFIES else ()
    pooling = msgspec.structs.replace(POOLING, labels=classes, activation="sigmoid")
    states = STATES if launch.config.enable_return_hidden_states else None
    info = EngineInfo(
        model_path=launch.config.model,
        architecture="FakeForCausalLM",
        dtype="float32",
        limits=msgspec.structs.replace(
            LIMITS, generates=not launch.config.is_embedding, states=states, pooling=pooling
        ),
        eos_token_ids=(EOS_ID,),
        page_size=16,
        max_running_requests=8,
        attention_backend="reference",
        platform="cpu",
        kv_bytes=12345,
        weight_bytes=54321,
        warmup_s=0.5,
        kernels=(("store_kv", "triton", "hung"), ("store_kv", "xla", "untested")),
    )
    mailbox.announce(info)
    speculates = launch.config.speculation.is_on
    FakeEngine(mailbox, launch.config.max_queued_requests, launch.endpoints.mask_mark(), speculates, classes).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A real server in a process of its own, through the openai client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

import httpx
import openai
import psutil
import vllm

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.vllm_plugin import WORKER_CLS
from tests.vllm_plugin.serving import PROMPTS, REFUSED, calls_by_name

TIMEOUT = 180
MODULE = "vllm.entrypoints.openai.api_server"
# As -m does, but that the processes it starts do not import the front end, which they have no use for, once more.
RUN_ONCE = ("-c", f"import runpy; runpy.run_module({MODULE!r}, run_name='__main__')")
SPECULATIVE = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}


class Server:
    """`python -m vllm.entrypoints.openai.api_server` with our worker, on a free port of 127.0.0.1."""

    def __init__(self, folder, *arguments, run=("-m", MODULE)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        metrics = folder / "prometheus"
        metrics.mkdir()
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /sleep, /collective_rpc and their like
        }
        environment.pop("TRITON_INTERPRET", None)
        command = [
            sys.executable, *run, "--model", EMBEDDED_TARGET,
            "--worker-cls", WORKER_CLS, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--served-model-name", "embedded", "--max-model-len", "1024", "--max-num-seqs", "8",
            "--kv-cache-memory-bytes", str(96 << 20), "--enforce-eager", *arguments,
        ]  # fmt: skip
        self.log_path = folder / "server.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)

    def wait(self):
        """Until it serves."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log_path.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError(self.log_path.read_text()[-4000:])

    def metric(self, name):
        """The sum over a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and line[len(name)] in " {")

    def stop(self):
        """Whatever is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    arguments = ("--block-size", "16", "--chat-template", str(template))
    fixed = json.dumps({"specpaged": {"adaptive": False}})  # so that it is sure to draft
    server = Server(folder, "--speculative-config", json.dumps(SPECULATIVE), "--additional-config", fixed, *arguments)
    try:
        server.wait()
        server.expected = complete(server, PROMPTS[0]).choices[0].text
        yield server
    finally:
        server.stop()


def complete(server, prompt, **arguments):
    return server.client.completions.create(
        model="embedded", prompt=prompt, **({"temperature": 0, "max_tokens": 24} | arguments)
    )


def test_completions_come_whole_and_streamed_alone_and_together(server):
    alone = [complete(server, prompt).choices[0].text for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt).choices[0].text, PROMPTS))
    streamed = ["".join(chunk.choices[0].text for chunk in complete(server, p, stream=True)) for p in PROMPTS]
    assert together == streamed == alone


def test_chat_stop_strings_and_log_probabilities(server):
    chat = server.client.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        max_tokens=8,
        temperature=0,
    )
    assert chat.usage.completion_tokens == 8
    whole = complete(server, PROMPTS[1]).choices[0].text
    stop = whole[5:8]
    choice = complete(server, PROMPTS[1], stop=[stop], logprobs=2).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) > 0
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_what_cannot_be_done_is_refused_by_name_and_others_go_on(server):
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, server, PROMPTS[2], max_tokens=100)
        for arguments, named in (
            ({"extra_body": {"thinking_token_budget": 3}}, "thinking_token_budget"),
            ({"extra_body": {"vllm_xargs": {"num_speculative_tokens": 5}}}, "allowed: 0 to 4"),
            ({"extra_body": {"min_p": 1.1}, "temperature": 1}, "min_p"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                complete(server, PROMPTS[0], **arguments)
        assert other.result().usage.completion_tokens == 100
    none = {"num_speculative_tokens": 0, "somebody_elses": 1}
    opted_out = complete(server, PROMPTS[2], max_tokens=100, extra_body={"vllm_xargs": none})
    assert opted_out.choices[0].text == other.result().choices[0].text


def test_min_p_and_logit_bias_change_nothing_of_what_drafts_change(server):
    asked = {"temperature": 0.8, "seed": 5, "max_tokens": 60, "logit_bias": {"101": 4.0}}
    beside, without = (
        complete(server, PROMPTS[4], **asked, extra_body={"min_p": 0.3} | own).choices[0].text
        for own in ({}, {"vllm_xargs": {"num_speculative_tokens": 0}})
    )
    assert beside == without
    assert beside != complete(server, PROMPTS[4], **asked).choices[0].text


@pytest.mark.parametrize("name", calls_by_name())
def test_whatever_vllm_calls_on_a_worker_does_its_work_or_says_why_not_and_the_server_goes_on(server, name):
    arguments = {
        "apply_model": ["not a function"], "discard": [["kv_cache"]], "execute_model": ["not a step"],
        "initialize_from_config": [[None]], "release_late_interaction_query_cache": [["a key"]],
        "sample_tokens": [None], "set_kv_cache_layout": ["LBNHC"],
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/collective_rpc", json={"method": name, "args": arguments.get(name, [])}, timeout=60
    )
    says_why_not = {
        "apply_model": "is not callable",
        "execute_model": "no attribute",
        "sample_tokens": "refuses sample_tokens: there is no step",
    }
    if name in REFUSED or name in says_why_not:
        assert answer.status_code == 500
        assert says_why_not.get(name, f"specpaged's worker refuses {name}: ") in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200
    assert complete(server, PROMPTS[0]).choices[0].text == server.expected


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wait_while_it_sleeps(server, level):
    assert httpx.post(f"{server.url}/sleep?level={level}", timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping", timeout=60).json() == {"is_sleeping": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server, PROMPTS[0])
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
        assert waiting.result(timeout=60).choices[0].text == server.expected


def test_weights_are_loaded_again_or_stay(server):
    for options, status in (({"weights_path": "/nowhere/at/all"}, 500), ({}, 200)):
        body = {"method": "reload_weights", "kwargs": options}
        assert httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60).status_code == status
        assert complete(server, PROMPTS[0]).choices[0].text == server.expected


def test_a_client_that_hangs_up_gives_its_blocks_back(server):
    before = server.metric("vllm:generation_tokens_total")
    stream = complete(server, PROMPTS[3], max_tokens=960, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.metric("vllm:generation_tokens_total") - before < 960  # it was not decoded to its end


def test_metrics_are_vllms_own_and_ours(server):
    """Of one request that ends by itself: of one that is aborted vLLM drops what it had under way."""
    names = {
        "accepted by vLLM's count": "vllm:spec_decode_num_accepted_tokens_total",
        "drafted by vLLM's count": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "specpaged:accepted_tokens_total",
        "accepted by place": "specpaged:accepted_tokens_per_position_total",
        "drafted": "specpaged:draft_tokens_total",
        "rolled back": "specpaged:rolled_back_tokens_total",
        "rounds": "specpaged:rounds_total",
        "seconds": "specpaged:stage_seconds_total",
    }
    before = {key: server.metric(name) for key, name in names.items()}
    assert complete(server, PROMPTS[0]).usage.completion_tokens == 24
    seen = {key: server.metric(name) - before[key] for key, name in names.items()}
    assert seen["accepted"] == seen["accepted by vLLM's count"] == seen["accepted by place"] > 0
    assert seen["drafted"] == seen["drafted by vLLM's count"]
    assert seen["rolled back"] == seen["drafted"] - seen["accepted"]
    assert 24 - seen["accepted"] <= seen["rounds"] <= 24
    assert seen["seconds"] > 0


def test_a_worker_that_is_killed_ends_in_vllms_own_error_and_no_hang(server):
    """The last that is asked of this server."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    long = {"max_tokens": 450, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        stream = complete(server, PROMPTS[0], stream=True, **long)
        others = [pool.submit(complete, server, prompt, **long) for prompt in PROMPTS[1:8]]
        next(iter(stream))
        (worker,) = [child for child in children if "Worker" in " ".join(child.cmdline())]
        worker.kill()
        errors = [request.exception(timeout=60) for request in others]
    assert any(isinstance(error, openai.APIError) for error in errors)
    server.process.wait(60)
    assert "EngineDeadError" in server.log_path.read_text()


@pytest.mark.long
def test_two_engines_behind_one_front_end_put_out_the_same_and_end_cleanly(make_vllm, tmp_path):
    arguments = ("--data-parallel-size", "2", "--speculative-config", json.dumps(SPECULATIVE))
    server = Server(tmp_path, *arguments, run=RUN_ONCE)
    try:
        server.wait()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: complete(server, prompt).choices[0].text, PROMPTS))
        params = vllm.SamplingParams(temperature=0, max_tokens=24)
        alone = make_vllm(0).generate(PROMPTS, params, use_tqdm=False)
        assert together == [output.outputs[0].text for output in alone]
        page = httpx.get(f"{server.url}/metrics", timeout=30).text
        for engine in (0, 1):
            (rounds,) = re.findall(rf'^specpaged:rounds_total{{engine="{engine}"}} (\S+)$', page, re.MULTILINE)
            assert float(rounds) > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.stop()

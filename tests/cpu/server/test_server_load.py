"""Clients that leave, read slowly or come in crowds; deadlines, drain, dead engines; metrics and the admin
port."""

import socket
import ssl
import threading
import time

import openai
import pytest

from shoal.fake_engine import FakeEngine
from shoal.stats import SleepState, Stats
from tests.certificates import write_certificate
from tests.fake_server import NAME, FakeServer, engine_saying, ids_of, post, read_until
from tests.waiting import eventually

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a", "max_tokens": 255}


def slow_engine(token_seconds=0.05):
    return engine_saying("word ", token_seconds=token_seconds)


def idle(server):
    return not server.engine._running and server.model.admission.active == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_requests(stream, n):
    with FakeServer(slow_engine(1.0)) as server:
        connection = server.raw(post(COMPLETE, {**LONG, "n": n, "stream": stream}))
        eventually(lambda: len(server.engine._running) == n)
        if stream:
            read_until(connection, b"data:")
        connection.close()
        eventually(lambda: idle(server))
        assert f'finished_reason="abort",model_name="tiny"}} {n}.0' in server.request("/metrics")[2]


def test_a_client_that_leaves_before_its_body_is_whole_is_forgotten():
    with FakeServer() as server:
        connection = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: server.app.exchanges)
        connection.close()
        eventually(lambda: not server.app.exchanges)


def test_a_slow_reader_holds_little_memory_and_is_cut_off():
    with FakeServer(slow_engine(1e-6), write_timeout=2.0, model={"max_model_len": 10**7}) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 10**7 - 1, "stream": True}))
        read_until(connection, b"data:")
        eventually(lambda: idle(server))  # nobody reads: aborted
        assert server.json(COMPLETE, {"prompt": "a", "max_tokens": 3})[0] == 200
        connection.close()


def test_nothing_is_computed_ahead_for_a_reader_that_takes_nothing():
    """Answers from the engine's outputs wait in the socket's buffers, and nowhere else."""

    class Counting(FakeEngine):
        taken = 0

        def _output(self, *args):
            self.taken += 1
            return super()._output(*args)

    with FakeServer(Counting(300, reply=ids_of("word ")), model={"max_model_len": 10**9}) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 10**8, "stream": True}))
        eventually(lambda: server.engine.taken)
        seen = [-1]

        def stands_still():
            time.sleep(0.5)
            seen.append(server.engine.taken)
            return seen[-1] == seen[-2]

        eventually(stands_still)
        assert server.json(COMPLETE, {"prompt": "a", "max_tokens": 3})[0] == 200
        connection.close()
        eventually(lambda: idle(server))


def test_a_slow_line_gets_a_big_answer_whole():
    with FakeServer(write_timeout=1.0, model={"max_model_len": 10**7}) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(
            post(COMPLETE, {"prompt": [65] * 4_000_000, "max_tokens": 1, "return_token_ids": True})
        )
        found = b""
        for _ in range(8):  # twice as long as a reader may take nothing
            found += connection.recv(1 << 18)
            time.sleep(0.25)
        head, _, body = (found + read_until(connection, b'"usage"')).partition(b"\r\n\r\n")
        assert b"200 OK" in head and len(body) > 12_000_000


# Where it is reached


def test_over_tls(tmp_path):
    key, certificate = write_certificate(tmp_path)
    with FakeServer(slow_engine(0.01), ssl_keyfile=key, ssl_certfile=certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with openai.DefaultHttpx2Client(verify=ssl.create_default_context(cafile=certificate)) as http:
            client = openai.OpenAI(
                base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http
            )
            parts = list(client.completions.create(model=NAME, prompt="x", max_tokens=20, stream=True))
            assert "".join(p.choices[0].text for p in parts) == "word " * 4
            stream = client.completions.create(model=NAME, prompt="x", max_tokens=250, stream=True)
            next(iter(stream))
            stream.close()
            eventually(lambda: idle(server))
        with pytest.raises(openai.APIConnectionError):  # the client doesn't know the certificate
            openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0).models.list()
        plain = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in read_until(plain)


def test_over_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no ::1 here")
    with FakeServer(host="::1", admin_host="::1") as server:
        assert server.url == f"http://[::1]:{server.port}"
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert client.completions.create(model=NAME, prompt="x", max_tokens=5).choices[0].text == "hello"


def test_the_queue_is_bounded_and_counts_every_answer():
    with FakeServer(slow_engine(1.0), model={"max_num_seqs": 2}, max_queued_requests=1) as server:
        held = [server.raw(post(COMPLETE, {**LONG, "n": n})) for n in (2, 1)]
        eventually(lambda: server.model.admission.active == 3)
        status, headers, text = server.request(COMPLETE, LONG)
        assert status == 429 and int(headers["Retry-After"]) >= 1 and "queue is full" in text
        assert (
            server.json("/load")[1] == {"server_load": 3}
            and server.metric("vllm:admission_rejections_total") == 1
        )
        assert server.request(COMPLETE, {**LONG, "n": 4})[0] == 400  # would never fit
        held[1].close()
        eventually(lambda: server.model.admission.active == 2)
        server.engine.token_seconds = 0.0
        assert server.request(COMPLETE, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_a_deadline_ends_requests_and_streams():
    with FakeServer(slow_engine(1.0), request_timeout=30.0) as server:
        for body in ({**LONG, "timeout": 0.2}, {**LONG, "timeout": 0.2, "n": 2}):
            status, answer = server.json(COMPLETE, body)
            assert status == 504 and answer["error"]["type"] == "timeout_error"
        events = server.events(COMPLETE, {**LONG, "timeout": 0.2, "stream": True})
        assert "choices" in events[0] and events[-1]["error"]["type"] == "timeout_error"
        eventually(lambda: idle(server))
    with FakeServer(slow_engine(1.0), request_timeout=0.2) as server:
        assert server.json(COMPLETE, {**LONG, "timeout": 50.0})[0] == 504


def test_draining_refuses_new_requests_and_finishes_the_running_ones():
    with FakeServer(slow_engine(0.1)) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 20, "stream": True}))
        read_until(connection, b"data:")
        server.call(server.drain.set)
        eventually(lambda: server.app.context.models.draining)
        status, headers, _ = server.request(COMPLETE, LONG)
        assert status == 503 and headers["Retry-After"]
        assert server.request("/health")[0] == 503
        rest = read_until(connection, b"[DONE]")
        assert b'"finish_reason":"length"' in rest
        server.wait_end()
        assert not server.force.is_set()


def test_the_grace_period_ends():
    with FakeServer(slow_engine(1.0), shutdown_timeout=0.3) as server:
        streaming, waiting = (
            server.raw(post(COMPLETE, {**LONG, "stream": True})),
            server.raw(post(COMPLETE, LONG)),
        )
        read_until(streaming, b"data:")
        eventually(lambda: len(server.engine._running) == 2)
        server.call(server.drain.set)
        assert b"grace period" in read_until(streaming)
        assert read_until(waiting).startswith(b"HTTP/1.1 503")
        server.wait_end()


def test_a_second_signal_ends_at_once():
    with FakeServer(slow_engine(1.0), shutdown_timeout=600.0) as server:
        connection = server.raw(post(COMPLETE, {**LONG, "stream": True}))
        read_until(connection, b"data:")
        server.call(server.drain.set)
        eventually(lambda: server.app.context.models.draining)
        server.call(server.force.set)
        assert b"ends at once" in read_until(connection)
        server.wait_end()


def test_a_dead_engine_fails_its_requests_and_the_health_check():
    with FakeServer(slow_engine(1.0)) as server:
        streaming, waiting = (
            server.raw(post(COMPLETE, {**LONG, "stream": True})),
            server.raw(post(COMPLETE, LONG)),
        )
        read_until(streaming, b"data:")
        eventually(lambda: len(server.engine._running) == 2)
        assert server.metric("shoal:engine_up") == 1
        server.call(server.engine.kill)
        assert b"engine_dead" in read_until(streaming, b"[DONE]")
        assert read_until(waiting, b"\r\n").startswith(b"HTTP/1.1 500")
        status, headers, text = server.request(COMPLETE, LONG)
        assert status == 503 and headers["Retry-After"] and "engine_dead" in text
        assert server.request("/health")[0] == 503 and server.metric("shoal:engine_up") == 0
        assert server.request("/version")[0] == 200


def test_many_streams_at_once_are_each_whole():
    with FakeServer(engine_saying("abcdefghij")) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        texts: dict[int, str] = {}

        def run(i):
            parts = client.completions.create(model=NAME, prompt="x", max_tokens=100, stream=True)
            texts[i] = "".join(p.choices[0].text for p in parts)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == dict.fromkeys(range(32), "abcdefghij" * 10)
        assert server.metric("vllm:generation_tokens_total") == 3200


def test_metrics_count_what_happened():
    with FakeServer(engine_saying("hello", cached_tokens=2)) as server:
        server.json(COMPLETE, {"prompt": "four", "max_tokens": 9})
        server.json(COMPLETE, {"prompt": "four", "max_tokens": 50, "stop": "lo", "n": 2})
        for name, value in (
            ("prompt_tokens_total", 12),
            ("prompt_tokens_cached_total", 6),
            ("request_success_total", 3),
            ("request_params_n_count", 2),
            ("time_to_first_token_seconds_count", 3),
            ("e2e_request_latency_seconds_count", 3),
            ("request_prompt_tokens_sum", 12),
            ("request_generation_tokens_count", 3),
            ("num_requests_running", 0),
            ("num_requests_waiting", 0),
            ("kv_cache_usage_perc", 0),
            ("prefix_cache_queries_total", 0),
            ("prefix_cache_hits_total", 0),
            ("num_preemptions_total", 0),
            ("num_requests_waiting_by_reason", 0),
            ("request_max_num_generation_tokens_count", 2),
            ("iteration_tokens_total_count", 0),
        ):
            assert server.metric("vllm:" + name) == value, name
        text = server.request("/metrics")[2]
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0' in text
        assert 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0' in text
        assert (
            text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1
            and "process_resident_memory_bytes" in text
        )
        server.engine.refuses = "prompt is bad"
        assert server.request(COMPLETE, LONG)[0] == 400
        server.engine.refuses, server.engine.error_after = None, 1
        assert server.request(COMPLETE, LONG)[0] == 500
        text = server.request("/metrics")[2]
        assert (
            server.metric("vllm:request_success_total") == 4
            and 'finished_reason="error",model_name="tiny"} 1.0' in text
        )
        server.engine.error_after = None
        usage = server.json(COMPLETE, {"prompt": "four", "max_tokens": 1})[1]["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_dashboards_find_the_caches_settings_and_the_engines_steps():
    class Stepping(FakeEngine):
        async def stats(self):
            steps = [2, 1] + [0] * 12  # two of one token, one of up to eight
            return Stats(
                num_waiting=5,
                num_deferred=2,
                step_tokens=7,
                steps_by_tokens=steps,
                decode_step_s=0.007,
                prompt_token_s=0.25,
            )

    cache = {"block_size": "16", "num_gpu_blocks": "99"}
    with FakeServer(Stepping(300, reply=ids_of("hello")), model={"cache_config": cache}) as server:
        server.json(COMPLETE, {"prompt": "a", "max_tokens": 50, "stop": "lo", "n": 2})
        text = server.request("/metrics")[2]
        names = 'engine="0",model_name="tiny"'
        for line in (
            f'cache_config_info{{block_size="16",{names},num_gpu_blocks="99"}} 1.0',
            f'num_requests_waiting_by_reason{{{names},reason="capacity"}} 3.0',
            f'num_requests_waiting_by_reason{{{names},reason="deferred"}} 2.0',
            'iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 2.0',
            'iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 3.0',
            'iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0',
            f"iteration_tokens_total_sum{{{names}}} 7.0",
            f"request_max_num_generation_tokens_sum{{{names}}} 5.0",
        ):
            assert f"\nvllm:{line}\n" in text, line
        assert f"\nshoal:decode_step_seconds_estimate{{{names}}} 0.007\n" in text
        assert f"\nshoal:prompt_token_seconds_estimate{{{names}}} 0.25\n" in text


def test_requests_are_counted_by_route_and_not_by_what_clients_make_up():
    with FakeServer() as server:
        server.json(COMPLETE, {"prompt": "a", "max_tokens": 2})
        server.request(COMPLETE, {"prompt": "a", "model": "nobody"})
        server.request(COMPLETE, method="PROPFIND")
        server.request("/v1/models/tiny")
        for i in range(50):
            server.request(f"/made-up-{i}")
        server.request("/health")
        lines = server.request("/metrics")[2].splitlines()
        assert {line for line in lines if line.startswith("http_requests_total{")} == {
            'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0',
            'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
            'http_requests_total{handler="/v1/completions",method="none",status="4xx"} 1.0',
            'http_requests_total{handler="/v1/models/{id}",method="GET",status="2xx"} 1.0',
            'http_requests_total{handler="none",method="GET",status="4xx"} 50.0',
        }
        assert server.metric("http_request_duration_seconds_count") == 54
        assert server.metric("http_request_duration_highr_seconds_count") == 54


# The admin port


def test_sleep_and_wake_up_over_http():
    with FakeServer() as server:
        assert server.json("/is_sleeping", admin=True)[1] == {"is_sleeping": False}
        status, report = server.json("/sleep?level=2&mode=abort", b"", admin=True)
        assert status == 200 and report["freed_bytes"] > 0
        status, headers, text = server.request(COMPLETE, LONG)
        assert status == 503 and headers["Retry-After"] and "sleep" in text
        assert server.request("/health")[0] == 200
        assert 'sleep_state="discard_all"} 1.0' in server.request("/metrics")[2]
        assert server.json("/wake_up?tags=weights", b"", admin=True)[0] == 200
        assert server.json("/is_sleeping", admin=True)[1] == {"is_sleeping": True}
        assert server.json("/wake_up?tags=weights&tags=kv_cache", b"", admin=True)[0] == 200
        assert server.request(COMPLETE, LONG)[0] == 200
        assert 'sleep_state="awake"} 1.0' in server.request("/metrics")[2]


def test_metrics_tell_the_sleep_that_is_so_not_the_last_that_was_asked_for():
    with FakeServer() as server:
        for path, state in (
            ("/sleep?level=2", "discard_all"),
            ("/pause", "discard_all"),
            ("/sleep?level=1", "discard_all"),
            ("/wake_up", "awake"),
            ("/pause", "awake"),
            ("/sleep?level=1", "weights_offloaded"),
            ("/pause", "weights_offloaded"),
            ("/resume", "awake"),
        ):
            assert server.request(path, b"", admin=True)[0] == 200
            for name in ("awake", "weights_offloaded", "discard_all"):
                labels, value = f'engine="0",model_name="tiny",sleep_state="{name}"', float(name == state)
                text = server.request("/metrics")[2]
                assert f"vllm:engine_sleep_state{{{labels}}} {value}" in text, (path, name)
        server.engine.state = SleepState(2, {"weights"})  # somebody else's doing
        assert 'sleep_state="discard_all"} 1.0' in server.request("/metrics")[2]


def test_sleep_aborts_running_requests_and_tells_them():
    with FakeServer(slow_engine(1.0)) as server:
        connection = server.raw(post(COMPLETE, {**LONG, "stream": True}))
        read_until(connection, b"data:")
        assert server.request("/sleep", b"", admin=True)[0] == 200
        assert b'"finish_reason":"abort"' in read_until(connection, b"[DONE]")


def test_pause_keeps_requests_and_resume_goes_on():
    with FakeServer(slow_engine(0.02)) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 30, "stream": True}))
        read_until(connection, b"data:")
        assert server.request("/pause?mode=keep", b"", admin=True)[0] == 200
        assert server.json("/is_paused", admin=True)[1] == {"is_paused": True}
        assert server.request(COMPLETE, LONG)[0] == 503
        assert server.request("/resume", b"", admin=True)[0] == 200
        assert b'"finish_reason":"length"' in read_until(connection, b"[DONE]")


def test_the_rest_of_the_admin_port():
    with FakeServer() as server:
        assert server.json("/reset_prefix_cache", b"", admin=True)[0] == 200
        assert server.json("/update_weights", {"path": "/some/folder"}, admin=True) == (200, {"version": 1})
        assert server.json("/update_weights?model=tiny", {"model": "org/name"}, admin=True) == (
            200,
            {"version": 2},
        )
        assert (
            server.json("/check_weights", admin=True)[1]["checksums"]
            and server.json("/memory_usage", admin=True)[1]["weights"]
        )
        assert server.request("/health", admin=True)[0] == 200
        assert server.json("/stop_profile", b"", admin=True)[0] == 400, "without a running trace"
        assert server.json("/start_profile?folder=traces", b"", admin=True)[0] == 200
        assert server.json("/stop_profile", b"", admin=True) == (
            200,
            {"files": ["shoal-traces/traces/fake.trace.json.gz"]},
        )
        for path, body in (
            ("/sleep?level=9", b""),
            ("/sleep?level=x", b""),
            ("/sleep?mode=nap", b""),
            ("/sleep?tags=nonsense", b""),
            ("/wake_up?tags=nonsense", b""),
            ("/sleep?tag=weights", b""),
            ("/sleep?level=1&level=2", b""),
            ("/sleep?level=%ff", b""),
            ("/update_weights", {}),
            ("/update_weights", {"path": "a", "model": "b"}),
            ("/update_weights", b"{"),
        ):
            status, answer = server.json(path, body, admin=True)
            assert status == 400 and len(answer["error"]["message"]) > 5, path
        assert server.json("/sleep?model=other", b"", admin=True)[0] == 404
        assert server.json("/is_sleeping", admin=True)[1] == {"is_sleeping": False}

"""A server that the launcher runs: one that does not come up, and one that ends too early."""

import os
import signal
import socket

from classroom_rl.config.base import GenerationConfig
from classroom_rl.server.client import server_url
from tests.launch.conftest import Launch


def test_a_server_for_everyone_is_reached_on_this_machine():
    assert server_url(GenerationConfig(server_host="0.0.0.0", server_port=81)) == "http://127.0.0.1:81"
    assert server_url(GenerationConfig(server_host="::1", server_port=82)) == "http://[::1]:82"


def test_a_server_that_dies_while_loading_ends_the_launch_with_its_last_lines(launched):
    launch = launched("dies loading", "succeeds")
    status, _, errors = launch.end()
    assert status == 2
    assert "status 7" in errors and "RuntimeError: no such model" in errors and "server.log" in errors
    assert not (launch.folder / "trainer.pids").exists()


def test_a_server_that_does_not_get_ready_is_given_up_on(launched):
    launch = launched("loads for ever", "succeeds", limit_s=1.0)
    status, _, errors = launch.end()
    assert status == 2 and "within generation.server_start_timeout_s = 1 s" in errors and "loading weights" in errors


def test_a_server_that_dies_again_and_again_ends_the_launch(launched):
    launch = launched("serves", "kills the server")
    status, _, errors = launch.end()
    assert status == 2 and f"error: The server ended with status {128 + signal.SIGKILL}" in errors
    assert errors.count("is started again") == 3


def test_a_server_that_dies_while_the_training_gets_on_is_started_again(launched):
    launch = launched("serves", "makes steps and kills the server")
    status, _, errors = launch.end()
    assert status == 0, errors
    assert errors.count("is started again (1 of at most 3 times") == 5


def test_a_taken_port_is_refused_and_its_holder_left_alone(tmp_path):
    launch = Launch(tmp_path, "serves", "succeeds")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", launch.port))
        holder.listen()
        status, _, errors = launch.start().end()
    assert status == 2
    assert str(launch.port) in errors and f"Process {os.getpid()} listens there" in errors
    assert not (tmp_path / "server.pids").exists()

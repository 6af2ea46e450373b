"""kvtierd under a real systemd: start, status, reload, watchdog, restarts and stop."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RELOADED = "/etc/kvtierd/conf.d/reloaded.yaml"


@pytest.fixture
def configured(service):
    """Write a piece of configuration that is gone after the test, and the daemon's with it."""

    def write(text: str) -> None:
        service.machine.write(RELOADED, text)

    yield write
    service.machine.remove(RELOADED)
    service.machine.run("systemctl", "reset-failed", "kvtierd", check=False)
    service.systemctl("restart")


def test_installation_places_the_unit_and_systemd_accepts_it(installed) -> None:
    assert "installed  /usr/local/lib/systemd/system/kvtierd.service" in installed.install.stdout
    verified = installed.run("systemd-analyze", "verify", "kvtierd.service")
    assert [line for line in verified.stderr.splitlines() if "kvtierd" in line] == []
    assert "kvtierd" in installed.run("id", "kvtierd").stdout
    assert installed.run("stat", "-c", "%U:%G %a", "/run/kvtierd/default").stdout.strip() == "kvtierd:kvtierd 750"
    assert installed.run("stat", "-c", "%U:%G %a", "/run/kvtierd/admin").stdout.strip() == "kvtierd:kvtierd 700"


def test_exposure_as_installed_is_at_most_2(installed, exposure) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", "kvtierd.service"]
    exposure.append(installed.run(*command).stdout.strip().splitlines()[-1])


def test_start_returns_when_the_daemon_serves_and_the_status_says_so(service) -> None:
    service.systemctl("stop")
    service.systemctl("start")
    assert "answers" in service.kvtierctl("ping", "--timeout", "5").stdout
    shown = service.show("ActiveState", "SubState", "StatusText", "MainPID")
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["StatusText"].startswith("serving on ipc:///run/kvtierd/default/kvtierd.sock")
    assert "serving on ipc:///run" in service.systemctl("status").stdout


def test_daemon_runs_as_its_user_with_nothing_to_spare(service) -> None:
    status = service.machine.run("cat", f"/proc/{service.pid()}/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = service.machine.run("id", "-u", "kvtierd").stdout.strip()
    assert set(fields["Uid"].split()) == {uid}
    assert {fields[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    limits = service.machine.run("cat", f"/proc/{service.pid()}/limits").stdout.splitlines()
    assert service.show("LimitMEMLOCK") == {"LimitMEMLOCK": "infinity"}
    locked = next(line for line in limits if line.startswith("Max locked memory")).split()[4]
    assert locked in {"unlimited", service.most_locked_memory()}


def test_client_stores_and_fetches_through_the_arena(service) -> None:
    assert service.client("store", "arena") == 32
    assert service.client("fetch", "arena") == 32


def test_reload_takes_over_what_may_change_and_names_what_waits(service, configured) -> None:
    pid = service.pid()
    configured("log: {level: debug}\nserver: {max_sessions: 17}\n")
    service.systemctl("reload")
    service.until("reloaded", lambda: "reloaded: log.level info -> debug" in service.journal_text())
    assert "after a restart: server.max_sessions 256 -> 17" in service.journal_text()
    service.until("active", lambda: service.show("ActiveState")["ActiveState"] == "active")
    assert "reloaded, 1 settings changed, 1 wait for a restart" in service.show("StatusText")["StatusText"]
    assert service.pid() == pid


def test_reload_of_mistakes_fails_and_keeps_the_old_settings(service, configured) -> None:
    pid = service.pid()
    configured("log: {levle: debug}\n")
    assert service.systemctl("reload", check=False).returncode != 0
    assert f"{RELOADED}:1: log.levle: unknown key; the nearest is log.level" in service.journal_text()
    service.kill("SIGHUP")
    service.until("said so", lambda: "all settings stay as they were" in service.journal_text())
    assert service.pid() == pid
    assert "answers" in service.kvtierctl("ping", "--timeout", "5").stdout


def test_kill_9_is_restarted_and_what_was_durable_is_there(service) -> None:
    assert service.client("store", "durable", "--flush") == 32
    pid, restarts = service.pid(), int(service.show("NRestarts")["NRestarts"])
    service.kill("SIGKILL")
    service.until("restarted", lambda: service.runs_again(pid))
    assert int(service.show("NRestarts")["NRestarts"]) == restarts + 1
    assert service.client("fetch", "durable") == 32


def test_watchdog_ends_a_frozen_daemon_and_it_is_restarted(service) -> None:
    pid = service.pid()
    service.kill("SIGSTOP")
    service.until("restarted", lambda: service.runs_again(pid))
    said = service.machine.run("journalctl", "--no-pager", "--unit=kvtierd", "--output=cat").stdout
    assert "Watchdog timeout (limit 3s)!" in said
    assert "answers" in service.kvtierctl("ping", "--timeout", "5").stdout


@pytest.mark.parametrize("text", ["host: {capasity: 1GiB}\n", "host: {capacity: 2GiB\n"])
def test_configuration_error_fails_at_once_and_is_not_tried_again(service, configured, text: str) -> None:
    configured(text)
    service.systemctl("restart", check=False)
    shown = service.show("ActiveState", "Result", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78", "NRestarts": "0"}


def test_stop_flushes_what_is_dirty_and_exits_0(service) -> None:
    assert service.client("store", "dirty") == 32
    lines = len(service.journal())
    service.systemctl("stop")
    assert service.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    # Any other exit code, or a signal, would be a line of "Main process exited" here.
    said = [line["MESSAGE"] for line in service.journal()[lines:]]
    assert [line for line in said if "exited" in line] == []
    assert {"stopped", "kvtierd.service: Deactivated successfully."} <= set(said)
    service.systemctl("start")
    assert service.client("fetch", "dirty") == 32


def test_second_daemon_on_the_same_folders_is_refused_with_75(service) -> None:
    done = service.machine.run(f"{service.bindir}/kvtierd", check=False, user="kvtierd")
    assert done.returncode == 75
    assert "another daemon" in done.stderr


def test_journal_has_fields_and_levels(service) -> None:
    service.kill("SIGUSR1")
    service.until("dumped", lambda: "state: host" in service.journal_text())
    line = next(line for line in service.journal() if line.get("MESSAGE") == "state: host")
    assert (line["PRIORITY"], line["SYSLOG_IDENTIFIER"]) == ("6", "kvtierd")
    assert line["LOGGER"] == "kvtierd.daemon.state"
    assert line["KVTIERD_HOST_CAPACITY_BYTES"] == str(64 << 20)
    assert line["_SYSTEMD_UNIT"] == "kvtierd.service"
    assert json.dumps(line)


def test_metrics_and_health_are_on_loopback(service) -> None:
    service.client("store", "metrics")
    text = service.get("/metrics")
    assert 'kvtierd_request_seconds_count{operation="commit"} ' in text
    assert 'kvtierd_nvme_mode{value="o_direct"} 1' in text or 'kvtierd_nvme_mode{value="buffered"} 1' in text
    assert service.get("/healthz") == service.get("/readyz") == "ok\n"


def test_operators_socket_is_for_root_and_the_daemon_and_nobody_else(service) -> None:
    assert "# host" in service.kvtierctl("info").stdout
    refused = service.machine.run(f"{service.bindir}/kvtierctl", "info", check=False, user="nobody")
    assert refused.returncode == 69
    assert "this is for root and for the user that runs kvtierd" in refused.stderr


def test_doctor_finds_nothing_broken_in_what_was_installed(service) -> None:
    done = service.kvtierctl("doctor", "--no-speeds", check=False)
    assert done.returncode == 0, done.stdout
    assert "0 failed" in done.stdout.splitlines()[-1]


def test_manual_pages_are_where_man_looks(installed) -> None:
    for page in ("man1/kvtierctl.1", "man5/kvtierd.yaml.5", "man8/kvtierd.8"):
        assert installed.exists(f"/usr/local/share/man/{page}")


def test_uninstalling_under_a_running_service_is_refused(service) -> None:
    done = service.kvtierctl("systemd", "uninstall", check=False)
    assert done.returncode == 64
    assert "is active" in done.stderr
    assert service.machine.exists("/usr/local/lib/systemd/system/kvtierd.service")

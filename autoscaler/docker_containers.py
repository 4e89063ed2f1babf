"""The containers of one service of one compose project, as Docker shows them. No other container is ever touched.

Design note.

* Which containers these are is asked of Docker anew each time, by the labels that compose gives them; nothing is kept.
* A new one is a copy of one that runs: its whole configuration as Docker tells it, with the next free number in name
  and labels. So `docker compose ps` and `down` see it, and `up --scale` counts it. The label `OURS` is added.
* Two that copy at the same time want the same name; Docker gives it to one, and the other has nothing to do.
* `stop` is what `docker stop` does: SIGTERM, the container's own grace period (`stop_grace_period`) to drain, SIGKILL.
  Docker then does not start it again by its restart policy. Stopping or removing twice is as good as once.
* What is left of a process like this one that died in between: a copy of ours that was never started is started, one
  that has ended is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound

from autoscaler.container import HOST_NAME_LENGTH, Container, EngineError
from shared.errors import shorten

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"
REPLACED = "com.docker.compose.replace"
OURS = "quire.autoscaled"
ANSWER_LIMIT_S = 20.0
DEFAULT_GRACE_S = 10
CONFLICT = 409


class DockerContainers:
    """See `autoscaler.container.WorkerContainers`, which documents every method.

    Args:
        url: of Docker, like `unix:///var/run/docker.sock`.
    """

    def __init__(self, url: str, project: str, service: str) -> None:
        self._url = url
        self._project = project
        self._service = service

    def find(self) -> list[Container]:
        labels = [f"{PROJECT}={self._project}", f"{SERVICE}={self._service}", f"{ONE_OFF}=False"]
        with self._client() as client:
            found = client.containers(all=True, filters={"label": labels})
        return sorted(map(_to_container, found), key=lambda container: container.number)

    def add(self, template: Container, number: int) -> bool:
        name = template.name.removesuffix(str(template.number)) + str(number)
        with self._client() as client:
            detail = client.inspect_container(template.id)
            networks = _networks(detail, self._service, name)
            first = dict(list(networks.items())[:1])
            try:
                made = client.create_container_from_config(_copy(detail, number, first), name)
            except APIError as error:
                if error.status_code == CONFLICT:
                    return False
                raise
            for network, settings in list(networks.items())[1:]:
                client.connect_container_to_network(made["Id"], network, aliases=settings["Aliases"])
            client.start(made["Id"])
        return True

    def start(self, container: Container) -> None:
        with self._client() as client, _may_be_gone():
            client.start(container.id)

    def stop(self, container: Container) -> None:
        with self._client() as client, _may_be_gone():
            grace_s = client.inspect_container(container.id)["Config"].get("StopTimeout") or DEFAULT_GRACE_S
            client.stop(container.id, timeout=grace_s)  # waits as long as that and ANSWER_LIMIT_S more
            client.remove_container(container.id, v=True)

    def remove(self, container: Container) -> None:
        with self._client() as client, _may_be_gone():
            client.remove_container(container.id, v=True)

    @contextmanager
    def _client(self) -> Iterator[Any]:
        try:
            client = docker.APIClient(base_url=self._url, version="auto", timeout=ANSWER_LIMIT_S)
            try:
                yield client
            finally:
                client.close()
        except (DockerException, OSError) as error:  # what its HTTP library raises is an OSError
            raise EngineError(f"Docker at {self._url}: {shorten(error)}") from error


@contextmanager
def _may_be_gone() -> Iterator[None]:
    try:
        yield
    except NotFound:
        return
    except APIError as error:
        if error.status_code != CONFLICT:  # somebody else is removing it, or it runs
            raise


def _to_container(found: dict[str, Any]) -> Container:
    labels = found["Labels"]
    number = labels.get(NUMBER, "")
    return Container(
        id=found["Id"],
        name=found["Names"][0].removeprefix("/"),
        number=int(number) if number.isdecimal() else 0,
        state=found["State"],
        is_ours=OURS in labels,
    )


def _copy(detail: dict[str, Any], number: int, networks: dict[str, Any]) -> dict[str, Any]:
    """What `detail` shows, as the configuration of a new container: the same but for what names it."""
    config = {key: value for key, value in detail["Config"].items() if key not in ("Hostname", "MacAddress")}
    if detail["Config"].get("Hostname") != detail["Id"][:HOST_NAME_LENGTH]:
        config["Hostname"] = detail["Config"].get("Hostname")
    labels = {key: value for key, value in config["Labels"].items() if key != REPLACED}
    return config | {
        "Image": detail["Image"],
        "Labels": labels | {NUMBER: str(number), OURS: "1"},
        "HostConfig": detail["HostConfig"],
        "NetworkingConfig": {"EndpointsConfig": networks},
    }


def _networks(detail: dict[str, Any], service: str, name: str) -> dict[str, dict[str, Any]]:
    return {network: {"Aliases": [service, name]} for network in detail["NetworkSettings"]["Networks"]}

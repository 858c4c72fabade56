"""The bootstrap server of all producers, where a run has one beside them: the supervisor's."""

from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.structs import BootstrapQuery
from kvreplay.transport.http import Exchange, HttpServer
from kvreplay.transport.paced import PacedLoop
from kvreplay.transport.traffic import Connection, Traffic


class ExternalBootstrap:
    """Answers at once. To be closed."""

    def __init__(self, paced: PacedLoop, *, replaces: bool) -> None:
        self.traffic = Traffic()
        self._server = BootstrapServer(replaces=replaces)
        self._http = HttpServer(paced, self._on_request)

    @property
    def endpoint(self) -> str:
        return self._http.endpoint

    def close(self) -> None:
        self._http.close()

    def _on_request(self, exchange: Exchange) -> None:
        request = exchange.request
        connection = Connection(self.endpoint, exchange.client)
        self.traffic.taken(connection)
        body = None if request.method == "GET" else request.body
        answer = self._server.answer(BootstrapQuery(request.path, body))
        self.traffic.sent(connection, is_answer=True)
        exchange.answer(answer.status, answer.body or b"")

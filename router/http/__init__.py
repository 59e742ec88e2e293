"""The HTTP door: OpenAI's API over the router's service. Translates; decides nothing about workers."""

from shoal.router.http.app import http_app
from shoal.router.http.server import HttpServer

__all__ = ["HttpServer", "http_app"]

"""Grafana dashboard and Prometheus alerts, made from the metrics that the code declares. Talks to no server."""

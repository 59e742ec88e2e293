"""The Ray driver: starts and watches the pools, publishes endpoints to routers."""

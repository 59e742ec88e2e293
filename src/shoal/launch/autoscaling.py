"""The parts that autoscaling is given: who brings machines, what tells the workers' pace. Knows configuration."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.kuberay import KubeRayMachines
from shoal.controller.kubernetes import Access, KubernetesApi
from shoal.controller.machines import FixedMachines, Machines, RayMachines
from shoal.errors import InvalidConfig
from shoal.model_files import open_model
from shoal.placement.service import ServiceModel
from shoal.simulator.calibration.profile_file import read_profile
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.service import CostService
from shoal.simulator.step_cost import StepCost
from shoal.types import DType
from shoal.visibility import Visibility


def machines_of(config: ServeConfig) -> Machines:
    """Checked: a RayCluster is there, fits the bounds and may be patched. Raises ShoalError with what to change."""
    if config.autoscale_nodes == "ray":
        return RayMachines()
    if config.autoscale_nodes != "kuberay":
        return FixedMachines()
    if find_spec("httpx2") is None:
        raise InvalidConfig("autoscale_nodes kuberay needs httpx2; run `pip install -e '.[kubernetes]'`")
    settings = config.autoscale
    machines = KubeRayMachines(KubernetesApi(Access.of(settings), settings.kubernetes_timeout_s), settings)
    bounds = {pool: own for pool in Pool if (own := config.autoscale_bounds(pool)) is not None}
    asyncio.run(machines.check(bounds))
    return machines


def service_of(config: ServeConfig) -> ServiceModel | None:
    """The simulator's cost model on the given profile; None: none was given. Raises InvalidConfig, NotFound."""
    if not config.autoscale.profile or not any(config.autoscale_bounds(pool) for pool in Pool):
        return None
    calibrated = read_profile(Path(config.autoscale.profile))
    model, num_bytes = open_model(config.model).config, DType(config.dtype).num_bytes
    spec = ModelSpec(config.model, model.shape, "served", weight_bytes=num_bytes, kv_bytes=num_bytes)
    visibility = replace(Visibility.parse(config.visibilities[0]), boundary_tokens=1)
    cost = StepCost(spec, Machine(calibrated.gpu, calibrated.profile), visibility)
    return CostService(cost, cost, config.token_budget)

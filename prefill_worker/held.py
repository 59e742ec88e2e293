"""Which layers a prefill worker must hold for what it may be asked. Knows the allow-list; loads nothing."""

from shoal.visibility import Visibility, VisibilityKind


def deepest_layers(policies: tuple[Visibility, ...], num_layers: int) -> tuple[range, range]:
    """What a prefill worker must hold for these policies: (layers run in full, layers of which only norm and K/V projection run).

    `full` needs no more of its last layer than that layer's KV; `speed` runs layer K−1 in full only for anchors; `pop` without
    late projection adds the upper layers' K/V projections (design §5).
    """
    full, kv_only = 0, 0
    for policy in policies:
        depth = policy.depth(num_layers)
        whole = policy.kind is VisibilityKind.POP or (policy.kind is VisibilityKind.SPEED and policy.anchor_tokens > 0)
        full = max(full, depth if whole else depth - 1)
        projects = policy.kind is VisibilityKind.POP and not policy.late
        kv_only = max(kv_only, num_layers if projects else depth)
    return range(full), range(full, max(full, kv_only))

"""`python -m infra.observability.live http://HOST:9090` asks a Prometheus every panel and alert, and says what finds nothing."""

import argparse
import json
import sys
from urllib.parse import urlencode
from urllib.request import urlopen

from infra.observability.alerts import ALERTS
from infra.observability.panels import WINDOW
from infra.observability.promql import declared
from infra.observability.rows import rows


def values(prometheus: str, expression: str) -> list[float]:
    """What an expression is now. Raises RuntimeError with Prometheus' words, OSError when it does not answer."""
    question = urlencode({"query": expression})
    with urlopen(f"{prometheus}/api/v1/query?{question}", timeout=30) as answer:  # of an operator's own choice
        told = json.load(answer)
    if told["status"] != "success":
        raise RuntimeError(f"{expression}: {told.get('error')}")
    return [float(sample["value"][1]) for sample in told["data"]["result"]]


def main() -> int:
    """Exit status 1 when an alert's expression or a panel's is refused; panels without data are only told."""
    parser = argparse.ArgumentParser(prog="python -m infra.observability.live", description=__doc__)
    parser.add_argument("prometheus", help="as in http://127.0.0.1:9090")
    parser.add_argument("--window", default="5m", help="of rates")
    options = parser.parse_args()
    num_asked, empty, refused = 0, [], []
    for row in rows(declared()):
        for panel in row.panels:
            for query in panel.queries:
                num_asked += 1
                try:
                    found = values(options.prometheus, query.expression.replace(WINDOW, options.window))
                except (RuntimeError, OSError) as error:
                    refused.append(f"{panel.title}: {error}")
                    continue
                if not found:
                    empty.append(f"{row.title} / {panel.title}: {query.legend}")
                elif all(value != value for value in found):  # NaN: a quantile or a share of nothing
                    empty.append(f"{row.title} / {panel.title}: {query.legend} (nothing was counted within {options.window})")
    print(f"{num_asked} expressions of the dashboard: {num_asked - len(empty) - len(refused)} return data")
    print("".join(f"  no data: {words}\n" for words in empty), end="")
    firing = []
    for alert in ALERTS:
        try:
            firing += [alert.name] if values(options.prometheus, alert.expression) else []
        except (RuntimeError, OSError) as error:
            refused.append(f"{alert.name}: {error}")
    print(f"{len(ALERTS)} alerts; true now: {', '.join(firing) or 'none'}")
    print("".join(f"  refused: {words}\n" for words in refused), end="")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())

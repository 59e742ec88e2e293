"""Which PEM files a server or a cluster uses, and which secret its processes share. Knows paths; reads none of them."""

from dataclasses import dataclass

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of PEM files; all empty: no TLS. Raises InvalidConfig when only half of what is needed is given."""

    certificate: str = ""  # with the chain up to, but without, the CA
    key: str = ""
    ca: str = ""  # who signs the certificates of those who connect
    require_client_certificate: bool = False

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            missing, given = ("key", "certificate") if self.certificate else ("certificate", "key")
            raise InvalidConfig(f"TLS needs a certificate and its key: {given} is given, {missing} is missing")
        if self.require_client_certificate and not self.ca:
            raise InvalidConfig("requiring client certificates needs the CA that signs them: give the CA's file, too")
        if self.ca and not self.require_client_certificate:
            raise InvalidConfig(
                "a CA has no effect at a server unless client certificates are required; ask for both, or neither"
            )
        if self.ca and not self.certificate:
            raise InvalidConfig("a CA alone turns no TLS on: give the server's certificate and key, too")

    @property
    def is_on(self) -> bool:
        return bool(self.certificate)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How the processes of one cluster prove to each other that they belong to it. Raises InvalidConfig.

    The secret is a file's content, so that a configuration may be logged or stand on a command line. TLS is always mutual.
    """

    secret_file: str = ""  # "": whoever reaches a port may call it
    certificate: str = ""  # serves and calls; its names must include CLUSTER_NAME
    key: str = ""
    ca: str = ""  # the cluster's own: whatever it signs is a member

    def __post_init__(self) -> None:
        given = [name for name in ("certificate", "key", "ca") if getattr(self, name)]
        if given and len(given) < 3:
            missing = [name for name in ("certificate", "key", "ca") if name not in given]
            raise InvalidConfig(
                f"TLS inside the cluster is mutual and needs certificate, key and CA; missing: {', '.join(missing)}"
            )

    @property
    def tls(self) -> TlsConfig:
        return TlsConfig(self.certificate, self.key, self.ca, require_client_certificate=bool(self.ca))

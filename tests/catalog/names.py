"""Aliases of tests, mostly of the one tenant that a server without keys has."""

from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey


def named(alias: str, namespace: str = DEFAULT_NAMESPACE) -> AliasKey:
    return AliasKey(namespace, alias)

"""`loraplex catalog`: an operator's commands over a catalog's database, with or without a server on it.

Servers see what is granted here within their next look at the catalog.
Specification: rulings "Tenants"; interface "Command line".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from loraplex.core.errors import CallerError, ErrorCode

if TYPE_CHECKING:
    from loraplex.catalog.store import CatalogStore

catalog_app = App(name="catalog", help="A catalog's database: check it, read its history, grant rights.")
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
CatalogUrl = Annotated[str, Parameter(name="--catalog", help="URL of the catalog's database.")]
Namespace = Annotated[str, Parameter(help="Namespace: the tenant that the alias belongs to.")]


@contextmanager
def _catalog(url: str, *, create: bool = False) -> Iterator[CatalogStore]:
    """create: a catalog that is not there is made; else a slip in the URL would be read as an empty, sound
    one.
    """
    from loraplex.catalog.store import CatalogStore

    store = CatalogStore.open(url, create=create)
    try:
        yield store
    finally:
        store.close()


@catalog_app.command(name="check")
def check_catalog(*, catalog: CatalogUrl, as_json: AsJson = False) -> int:
    """Check every record of a catalog against its seal, its digests and the log."""
    from loraplex.catalog.audit import audit

    with _catalog(catalog) as store:
        found = audit(store)
    print(json.dumps(found.record(), indent=2) if as_json else "\n".join(found.lines()))
    return 1 if found.problems else 0


@catalog_app.command
def history(alias: str, /, *, catalog: CatalogUrl, namespace: Namespace = "default") -> None:
    """List every revision of ALIAS as JSON, the newest first: digests, source, who published it and when."""
    import msgspec

    from loraplex.catalog.records import AliasKey

    with _catalog(catalog) as store:
        revisions = store.history(AliasKey(namespace, alias))
    print(json.dumps([msgspec.to_builtins(revision) for revision in revisions], indent=2))


@catalog_app.command
def grant(
    tenant: str, alias: str, /, *rights: str, catalog: CatalogUrl, namespace: Namespace = "default"
) -> None:
    """Let TENANT (or *) do RIGHTS (use, list, load, swap) with ALIAS (or *) of a namespace."""
    from loraplex.catalog.records import Grant, Right

    known = [right.value for right in Right]
    for right in rights:
        if right not in known:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"{right!r} is no right, expected {', '.join(known)}",
                param="rights",
            )
    record = Grant(namespace, alias, tenant, tuple(sorted({Right(right) for right in rights})))
    with _catalog(catalog, create=True) as store:
        print(f"generation {store.grant(record)}")


@catalog_app.command
def withdraw(tenant: str, alias: str, /, *, catalog: CatalogUrl, namespace: Namespace = "default") -> None:
    """Take back what was granted to TENANT for ALIAS."""
    with _catalog(catalog) as store:
        print(f"generation {store.withdraw(namespace, alias, tenant)}")


@catalog_app.command
def grants(*, catalog: CatalogUrl) -> None:
    """List who may do what: tenant, namespace/alias, rights."""
    with _catalog(catalog) as store:
        changes = store.changes()
    for record in changes.grants or ():
        print(f"{record.tenant} {record.namespace}/{record.alias} {','.join(record.rights)}")
    for error in changes.damaged_grants:
        print(f"ignored: {error}")

"""What names mean at this moment, to whom: questions to the catalog as this process sees it, answered without
waiting.

Specification: rulings "Tenants".
"""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision, Right


class CatalogNames:
    """Read-only side of an `AdapterCatalog`: current revisions, and what a tenant may see of them."""

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog

    def __iter__(self) -> Iterator[Revision]:
        return iter(self._catalog)

    @property
    def generation(self) -> int:
        """The catalog's generation."""
        return self._catalog.generation

    @property
    def catalog(self) -> AdapterCatalog:
        """The catalog behind the names."""
        return self._catalog

    def resolve(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What `alias` or `alias@revision` means to a tenant now; `model_not_found` otherwise."""
        return self._catalog.resolve(name, tenant)

    def current(self, alias_key: AliasKey) -> Revision:
        """Current revision of an alias; `adapter_not_found` otherwise."""
        return self._catalog.current(alias_key)

    def find(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision | None:
        """Current revision of what a tenant that may list it means by a name, or None."""
        return self._catalog.view.find(tenant, name, Right.LIST)

    def may_list(self, revision: Revision, tenant: str = DEFAULT_NAMESPACE) -> bool:
        """Whether a tenant may know of a revision's alias."""
        return self._catalog.view.may(tenant, revision.alias_key, Right.LIST)

    def visible(self, tenant: str = DEFAULT_NAMESPACE) -> list[tuple[str, Revision]]:
        """(its name for the tenant, revision) of everything that a tenant may list, by name."""
        return self._catalog.view.visible(tenant)

    def target(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> AliasKey:
        """The alias that a tenant means by a name under which it publishes."""
        return self._catalog.view.target(tenant, name)

    def owned(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What a tenant means by a name that it changes; raises `adapter_not_found`, and `forbidden` for
        others'.
        """
        return self._catalog.view.owned(tenant, name)

"""Write the second bill of materials of a release: SPDX 3.0.1 with the AI and Dataset profiles, as plain JSON-LD.

Identifiers are URNs under a hash of the files, so the same release gives the same bytes. SPDX requires a date of
creation, and a release has none. ``created`` is therefore the start of Unix time, which reproducible builds use as the
date of files without one (https://reproducible-builds.org/docs/source-date-epoch/), and a comment says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from mergegate.tasks.publish.bill_content import (
    BillContent,
    ancestor_package_url,
    contact_of,
    dataset_address,
    license_expression,
    web_address,
)
from mergegate.tasks.publish.facts import DatasetFacts
from mergegate.tasks.publish.parent_facts import ParentFacts

NO_DATE = "1970-01-01T00:00:00Z"
_CREATION = "_:creation"
_NO_LICENSE = "https://spdx.org/rdf/3.0.1/terms/ExpandedLicensing/NoAssertionLicense"
_NO_DATE_NOTE = (
    "The date is a placeholder: SPDX requires one, and this release contains no dates, so that the same inputs give "
    "the same bytes."
)


def spdx_document(bill: BillContent) -> str:
    """Return the content of ``bom.spdx.json``."""
    graph = list(_Graph(bill).elements())
    document = {"@context": "https://spdx.org/rdf/3.0.1/spdx-context.jsonld", "@graph": graph}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


class _Graph:
    """Elements of one document, which refer to each other by their identifiers."""

    def __init__(self, bill: BillContent) -> None:
        self.bill = bill
        self.base = f"urn:mergegate:spdx:{bill.version}"
        self.licenses: dict[str, str] = {}  # identifiers of license expressions
        self.suppliers: dict[str, str] = {}  # identifiers of suppliers, by name
        self.relationships: list[dict[str, object]] = []

    def elements(self) -> Iterator[dict[str, object]]:
        bill, facts = self.bill, self.bill.facts
        packages = [self._model()]
        packages += [self._ancestor(number, parent) for number, parent in enumerate(facts.parents, 1)]
        packages += [self._dataset(number, data) for number, data in enumerate(facts.datasets, 1)]
        training_data = dict.fromkeys(name for parent in facts.parents for name in parent.datasets)
        packages += [self._training_data(number, name) for number, name in enumerate(training_data, 1)]
        files = [self._file(number) for number in range(1, len(bill.files) + 1)]
        trained_on = {name: self._id("training-data", number) for number, name in enumerate(training_data, 1)}
        model = self._id("model")
        self._relate(model, "contains", [str(file["spdxId"]) for file in files], completeness="complete")
        parents = [self._id("parent", number) for number in range(1, len(facts.parents) + 1)]
        self._relate(model, "dependsOn", parents, type="LifecycleScopedRelationship", scope="build")
        for number, parent in enumerate(facts.parents, 1):
            self._relate(self._id("parent", number), "ancestorOf", [model])
            self._relate(self._id("parent", number), "trainedOn", [trained_on[name] for name in parent.datasets])
        for number, data in enumerate(facts.datasets, 1):
            kind = "other" if data.purpose == "calibration" else "testedOn"
            note = {"comment": "A model read this text for the merge."} if data.purpose == "calibration" else {}
            self._relate(model, kind, [self._id("dataset", number)], **note)
        agents = [
            self._element("Agent", identifier, name=name, **self._contact(name))
            for name, identifier in self.suppliers.items()
        ]
        tool = self._element("Tool", self._id("tool"), name=f"mergegate {bill.libraries.get('mergegate', '')}".strip())
        author = self.suppliers.get(facts.about.supplier.name) if facts.about.supplier else None
        if author is None:
            author = self._id("author")
            agents.append(self._element("SoftwareAgent", author, name="mergegate"))
        licenses = [
            self._element("simplelicensing_LicenseExpression", identifier, simplelicensing_licenseExpression=expression)
            for expression, identifier in self.licenses.items()
        ]
        described = [*agents, tool, *licenses, *packages, *files, *self.relationships]
        sbom = self._element(
            "software_Sbom",
            self._id("sbom"),
            software_sbomType=["build"],
            rootElement=[model],
            element=[item["spdxId"] for item in described],
        )
        yield {
            "@id": _CREATION,
            "type": "CreationInfo",
            "specVersion": "3.0.1",
            "created": NO_DATE,
            "createdBy": [author],
            "createdUsing": [self._id("tool")],
            "comment": _NO_DATE_NOTE,
        }
        yield self._element(
            "SpdxDocument",
            self.base,
            name=f"{facts.name} {bill.version[:12]}",
            profileConformance=["core", "software", "ai", "dataset", "simpleLicensing"],
            rootElement=[sbom["spdxId"]],
            element=[sbom["spdxId"], *(item["spdxId"] for item in described)],
        )
        yield sbom
        yield from described

    def _model(self) -> dict[str, object]:
        bill, facts = self.bill, self.bill.facts
        identifier = self._id("model")
        self._license(identifier, bill.license)
        supplier = facts.about.supplier
        sizes = {**facts.hyperparameters, "parameters": facts.parameters, "dtypes": ", ".join(facts.dtypes)}
        sizes |= {"quantization": ", ".join(bill.variant_types), "tokenizer_class": bill.tokenizer_class}
        return self._element(
            "ai_AIPackage",
            identifier,
            name=facts.name,
            description=bill.description,
            comment=f"Missing facts: {', '.join(bill.missing)}." if bill.missing else "",
            software_packageVersion=bill.version,
            software_packageUrl=bill.package_url,
            software_downloadLocation=bill.download,
            software_homePage=bill.page or web_address(supplier.url if supplier else ""),
            software_primaryPurpose="model",
            suppliedBy=self._supplier(supplier.name if supplier else ""),
            ai_typeOfModel=[name for name in (facts.architecture, facts.model_type) if name],
            ai_hyperparameter=_dictionary(sizes),
            ai_informationAboutTraining=bill.training,
            ai_informationAboutApplication=" ".join(facts.about.intended_use),
            ai_limitation=" ".join(bill.limits),
            ai_metric=_dictionary({f"{metric.task}: {metric.metric}": str(metric) for metric in bill.metrics}),
            ai_metricDecisionThreshold=_dictionary(bill.thresholds),
        )

    def _ancestor(self, number: int, parent: ParentFacts) -> dict[str, object]:
        identifier = self._id("parent", number)
        self._license(identifier, parent.license)
        energy: dict[str, object] = {}
        if parent.energy:
            description = {
                "type": "ai_EnergyConsumptionDescription",
                "ai_energyQuantity": float(f"{parent.energy:.3g}"),
                "ai_energyUnit": "kilowattHour",
            }
            energy = {"type": "ai_EnergyConsumption", "ai_trainingEnergyConsumption": [description]}
        return self._element(
            "ai_AIPackage",
            identifier,
            name=parent.name,
            software_packageVersion=parent.identity,
            software_packageUrl=ancestor_package_url(parent),
            software_downloadLocation=web_address(parent.url),
            software_primaryPurpose="model",
            suppliedBy=self._supplier(parent.supplier),
            ai_energyConsumption=energy,
        )

    def _dataset(self, number: int, data: DatasetFacts) -> dict[str, object]:
        identifier = self._id("dataset", number)
        self._license(identifier, "")
        address = next(filter(None, map(dataset_address, data.sources)), "")
        is_text = data.purpose != "evaluation" or self.bill.formats[0] == ("text",)
        documents = f" {data.documents:,} documents were used." if data.documents else ""
        return self._element(
            "dataset_DatasetPackage",
            identifier,
            name=data.name,
            description=f"Data for {data.purpose}.{documents}",
            software_packageVersion=data.digest,
            software_downloadLocation=address,
            software_primaryPurpose="data",
            suppliedBy=self._supplier(data.sources[0].partition("/")[0] if address and "/" in data.sources[0] else ""),
            dataset_datasetType=["text" if is_text else "noAssertion"],
            dataset_intendedUse=data.purpose,
        )

    def _training_data(self, number: int, name: str) -> dict[str, object]:
        identifier = self._id("training-data", number)
        self._license(identifier, "")
        return self._element(
            "dataset_DatasetPackage",
            identifier,
            name=name,
            description="Training data that the card of a parent names.",
            software_downloadLocation=dataset_address(name),
            software_primaryPurpose="data",
            suppliedBy=self._supplier(name.partition("/")[0] if "/" in name and dataset_address(name) else ""),
            dataset_datasetType=["noAssertion"],
            dataset_intendedUse="training",
        )

    def _file(self, number: int) -> dict[str, object]:
        file = self.bill.files[number - 1]
        digest = {"type": "Hash", "algorithm": "sha256", "hashValue": file.sha256}
        return self._element("software_File", self._id("file", number), name=file.name, verifiedUsing=[digest])

    def _license(self, package: str, license: str) -> None:
        """State the license of a package. The AI and Dataset profiles require both statements for each package."""
        expression = license_expression(license)
        to = self.licenses.setdefault(expression, self._id("license", expression)) if expression else _NO_LICENSE
        self._relate(package, "hasDeclaredLicense", [to])
        self._relate(package, "hasConcludedLicense", [to])

    def _supplier(self, name: str) -> str:
        return self.suppliers.setdefault(name, self._id("supplier", len(self.suppliers) + 1)) if name else ""

    def _contact(self, name: str) -> dict[str, object]:
        """Return the contact of the publisher."""
        supplier = self.bill.facts.about.supplier
        email, page = contact_of(self.bill)
        if supplier is None or supplier.name != name:
            return {}
        identifiers = [
            {"type": "ExternalIdentifier", "externalIdentifierType": kind, "identifier": value}
            for kind, value in (("email", email), ("urlScheme", page or web_address(supplier.url)))
            if value
        ]
        return {"externalIdentifier": identifiers}

    def _relate(self, source: str, kind: str, to: Sequence[str], **more: str) -> None:
        if to:
            identifier = self._id("relationship", len(self.relationships) + 1)
            fields: dict[str, Any] = {"from": source, "relationshipType": kind, "to": list(to), **more}
            self.relationships.append({**self._element("Relationship", identifier), **fields})

    def _element(self, element_type: str, identifier: str, **fields: object) -> dict[str, object]:
        """Return an element with the fields that have a value."""
        known = {name: value for name, value in fields.items() if value not in ("", None, [], {})}
        return {"type": element_type, "spdxId": identifier, "creationInfo": _CREATION, **known}

    def _id(self, *parts: object) -> str:
        return f"{self.base}#{'-'.join(quote(str(part), safe='') for part in parts)}"


def _dictionary(values: Mapping[str, object]) -> list[dict[str, str]]:
    return [
        {"type": "DictionaryEntry", "key": key, "value": str(value)}
        for key, value in values.items()
        if value not in ("", None)
    ]

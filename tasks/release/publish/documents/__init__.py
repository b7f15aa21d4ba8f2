"""Write the documents of a release from its facts: report, card, compliance sheet, bill of materials and provenance."""

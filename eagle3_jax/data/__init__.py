"""From files of conversations to packed token rows: records -> template -> vocabulary, packing."""

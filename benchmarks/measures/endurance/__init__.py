"""What a search must outlast: one module a question. Each names its cases, tries one of them, and judges them all."""

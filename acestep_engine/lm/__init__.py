"""The language-model half: words to a plan, a plan to audio codes."""

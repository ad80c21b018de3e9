"""Text and token ids: tokenise, detokenise, stop strings, chat templates, grammars."""

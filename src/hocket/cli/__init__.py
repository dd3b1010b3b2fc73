"""The command line: verbs and flags. Each verb imports its room only when it is called."""

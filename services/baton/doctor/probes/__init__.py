"""Programs of the doctor's: each looks at a library in a process of its own, and prints one JSON object."""

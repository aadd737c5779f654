"""Takes compute-sanitizer's place on a machine without a GPU: runs the command and writes a given log.

It keeps no descriptor of its parent's, and writes its last lines only when the command has exited by itself,
as the real one does.
"""

import os
import subprocess
import sys

words = sys.argv[1:]
log = words[words.index("--log-file") + 1]
tool = words[words.index("--tool") + 1]
start = next(i for i, word in enumerate(words) if word == sys.executable)
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
with open(log, "w") as file:
    file.write("========= COMPUTE-SANITIZER\n")
if os.environ["FAKE_LOG"] == "refuses to start":
    print("========= Error: Target application terminated before first instrumented API call")
    sys.exit(255)
status = subprocess.run(words[start:], close_fds=True, check=False).returncode
with open(os.environ["FAKE_LOG"]) as given, open(log, "a") as file:
    text = given.read().partition("\n")[2]
    file.write(text if status == 0 else text.partition("SUMMARY")[0].rpartition("\n")[0] + "\n")

#!/bin/sh
# Measure a GPU from the bundle that this file lies in (scripts/gpu-bundle made it):
#     ./run.sh OUTPUT [1|2|both] [options of python -m loadtest.gpu]
# Each call takes less than nine minutes. The second finds the kernels that the first has built if it has the
# same OUTPUT, or by --cache FILE. PYTHON chooses the interpreter: one that has torch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
output=$1
shift
case ${1:-both} in
1 | 2) calls=$1 && shift ;;
both) calls="1 2" && { [ $# -eq 0 ] || shift; } ;;
*) calls="1 2" ;;
esac
mkdir -p "$output"
output=$(cd "$output" && pwd)
export PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}"
cd "$here/baton"
status=0
for call in $calls; do
    built=$output/triton-cache.tar.gz
    if [ "$call" = 2 ] && [ -f "$built" ]; then
        "${PYTHON:-python3}" -m loadtest.gpu --call 2 --output "$output" --cache "$built" "$@" || status=$?
    else
        "${PYTHON:-python3}" -m loadtest.gpu --call "$call" --output "$output" "$@" || status=$?
    fi
done
exit $status

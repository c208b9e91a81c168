// The kernels for any CPU: 4 lanes, whatever instructions the compiler's defaults allow.
#include "abi.h"
#include "kernels.h"

const WideOps *widellm_ops_portable() { return &kOps; }

// new_tokens.cu on a CPU. The compiler is told NEW_T tokens and NEW_CLUSTER programs beside what that file wants.
#define PROGRAMS_Y NEW_G
#define PROGRAMS_Z NEW_T
#define THREADS_X 256
#define CLUSTER_SIZE NEW_CLUSTER
#define SHARED_BYTES (192 << 10)
#include "emulated_cuda.h"
#include "new_tokens.cu"

static const Arguments* given;
static void thread_main() {
  attend_new_tokens(*given);
  end_thread();
}
extern "C" int run(const Arguments* arguments) {
  given = arguments;
  run_all(thread_main);
  return sizeof(Shared);
}

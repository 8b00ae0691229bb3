//! The `plimsoll` binary.

use std::process::ExitCode;

/// Gives back to the system what a burst of large requests leaves free, by threads of its own and within seconds. glibc's keeps
/// the most that each of many arenas ever held, and a leak could not be told from that. mimalloc 3 is built in 5 s instead of 66 s
/// of a CPU, but held 250 MiB in the soak where this held 105, and gave less back at rest; glibc's with four arenas and `malloc_trim`
/// every five seconds held less than this, at 14 % more time of the engine's thread (`scripts/bench-front`, 256 streams).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    plimsoll_cli::main()
}

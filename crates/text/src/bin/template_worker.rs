//! The worker of tests: the server's is the server's own program.

fn main() -> std::io::Result<()> {
    plimsoll_text::run_template_worker()
}

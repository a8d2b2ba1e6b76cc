"""The `baton` command with fakes for what it starts."""

from deploy import cli, plan, up

plan.WORKER, plan.ROUTER, up.PREPARE = "fake_worker", "fake_router", "fake_prepare"

if __name__ == "__main__":
    cli.main()

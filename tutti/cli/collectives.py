from tutti.bench.message_sizes import parse_sizes
from tutti.cli.ranks import on_ranks
from tutti.config.load import resolve

def bench(overrides, ranks, trials, seconds, sizes, operations):
    config = resolve("hello", [*overrides, "recipe=collectives"]).config
    def work(placement, folder):
        from tutti.bench.session import open_session
        from tutti.bench.collectives import Request, measure, OPERATIONS
        import json, statistics
        from tutti.bench.fit import Point, fit_line, fit_model, BUS_FACTORS, wire_bits_per_second
        with open_session("bench", config, placement, folder) as s:
            m, d = measure(s, Request(tuple((operations or ",".join(OPERATIONS)).split(",")), parse_sizes(sizes), trials, seconds), lambda *a: None)
            if s.group.is_first:
                (s.folder.path/"raw.json").write_text(json.dumps([x.plain() for x in m]))
                for x in m: print(x.operation, x.ranks, x.bytes, x.calls, *[f"{t*1e3:.3f}" for t in x.trials_seconds])
                print(d)
                for op in OPERATIONS:
                    pts=[Point(x.ranks,x.bytes,statistics.median(x.trials_seconds)) for x in m if x.operation==op]
                    for n in sorted({p.ranks for p in pts}):
                        l=fit_line([p for p in pts if p.ranks==n])
                        print(op,n,l, BUS_FACTORS[op](n)*l.bytes_per_second/1e6, wire_bits_per_second(BUS_FACTORS[op](n)*l.bytes_per_second)/1e6)
                    print(fit_model(op,pts,s.group.hosts.count(s.group.hosts[0])))
    on_ranks("bench", config, ranks, ["tutti.bench.collectives"], work)

package msgcmd

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

const leaseUsage = `agentlab-lease shows when this sandbox ends, and renews its lease if its profile
allows that.

Usage:
  agentlab-lease
  agentlab-lease renew [--minutes N]

renew makes the lease end N minutes from now (default: the profile's time), not before
its current end.

Exit codes: 0 done, 1 failed (the reason is on standard error), 2 wrong usage.
`

func runLease(ctx context.Context, dir string, args []string, out, errOut io.Writer) int {
	var want guestapi.LeaseRenew
	renew := len(args) > 0 && args[0] == "renew"
	if renew {
		args = args[1:]
	}
	f := flag.NewFlagSet(Lease, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	if renew {
		f.IntVar(&want.Minutes, "minutes", 0, "")
	}
	err := f.Parse(args)
	if err == nil && (f.NArg() > 0 || want.Minutes < 0) {
		err = errUsage
	}
	if errors.Is(err, flag.ErrHelp) {
		return help(out, leaseUsage)
	}
	if err != nil {
		_, _ = fmt.Fprintf(errOut, "%s: %v\n\n%s", Lease, err, leaseUsage)
		return 2
	}
	var now guestapi.Lease
	c, err := open(dir)
	if err == nil && renew {
		var p []byte
		if p, err = json.Marshal(want); err == nil {
			err = c.call(ctx, http.MethodPost, guestapi.PathLease, p, &now)
		}
	} else if err == nil {
		err = c.call(ctx, http.MethodGet, guestapi.PathLease, nil, &now)
	}
	if err == nil {
		_, err = fmt.Fprintf(out, "the lease of this sandbox ends at %s\n", now.ExpiresAt.UTC().Format(time.RFC3339))
	}
	if err != nil {
		_, _ = fmt.Fprintf(errOut, "%s: %s\n", Lease, agentlab.WithoutControls(err.Error()))
		return 1
	}
	return 0
}

package qemu

import (
	"context"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egresslog"
)

// EgressLog implements backend.EgressLogger.
func (d *Driver) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if err := validRef(ref); err != nil {
		return nil, err
	}
	if _, err := d.load(ref); err != nil {
		return nil, err
	}
	return egresslog.Read(ctx, filepath.Join(d.dir(ref), fileEgress), after, limit)
}
